#include "support/oracle.h"

#include <algorithm>
#include <cmath>

#include "support/dots.h"

namespace logitless::test {
namespace {

double class_weight(const OracleProblem& p, std::int64_t j) {
  return p.class_weight.empty() ? 1.0 : p.class_weight[j];
}
double token_weight(const OracleProblem& p, std::int64_t i) {
  return p.token_weight.empty() ? 1.0 : p.token_weight[i];
}
double target_weight(const OracleProblem& p, std::int64_t slot) {
  return p.target_weight.empty() ? 1.0 : p.target_weight[slot];
}

double log_sum_exp(const double* z, std::int64_t n) {
  double top = -INFINITY;
  for (std::int64_t j = 0; j < n; ++j) top = std::max(top, z[j]);
  if (top == -INFINITY) return top;
  double sum = 0;
  for (std::int64_t j = 0; j < n; ++j) sum += std::exp(z[j] - top);
  return top + std::log(sum);
}

}  // namespace

OracleLogits oracle_logits(const OracleProblem& p) {
  OracleLogits out;
  out.z.resize(p.tokens * p.vocab);
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    for (std::int64_t j = 0; j < p.vocab; ++j) {
      double a = add_dot(p.bias.empty() ? 0.0 : p.bias[j], p.hidden.data() + i * p.dim,
                         p.weight.data() + j * p.dim, p.dim);
      a *= p.logit_scale;
      out.z[i * p.vocab + j] = p.softcap > 0 ? p.softcap * std::tanh(a / p.softcap) : a;
    }
    out.lse.push_back(log_sum_exp(out.z.data() + i * p.vocab, p.vocab));
  }
  return out;
}

bool oracle_ignored(const OracleProblem& p, std::int64_t token) {
  for (int k = 0; k < p.per_token; ++k) {
    if (p.targets[token * p.per_token + k] != p.ignore_index) return false;
  }
  return true;
}

double oracle_token_loss(const OracleProblem& p, std::int64_t token, const double* z) {
  if (oracle_ignored(p, token)) return 0.0;
  const double lse = log_sum_exp(z, p.vocab);
  double loss = 0;
  for (std::int64_t slot = token * p.per_token; slot < (token + 1) * p.per_token; ++slot) {
    const std::int64_t y = p.targets[slot];
    if (y == p.ignore_index) continue;
    loss += (1 - p.label_smoothing) * class_weight(p, y) * target_weight(p, slot) * (lse - z[y]);
  }
  if (p.label_smoothing > 0) {
    for (std::int64_t j = 0; j < p.vocab; ++j)
      loss += p.label_smoothing / p.vocab * class_weight(p, j) * (lse - z[j]);
  }
  loss += p.z_loss * lse * lse;
  return token_weight(p, token) * loss;
}

double oracle_normalizer(const OracleProblem& p) {
  double total = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    if (oracle_ignored(p, i)) continue;
    total += token_weight(p, i) * (p.target_weight.empty() ? class_weight(p, p.targets[i]) : 1.0);
  }
  return total;
}

OracleGradients oracle_chain(const OracleProblem& p, const OracleLogits& logits,
                             const std::vector<double>& dz) {
  OracleGradients g;
  g.d_hidden.assign(p.tokens * p.dim, 0.0);
  g.d_weight.assign(p.vocab * p.dim, 0.0);
  g.d_bias.assign(p.vocab, 0.0);
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    for (std::int64_t j = 0; j < p.vocab; ++j) {
      double da = dz[i * p.vocab + j];
      if (da == 0.0) continue;
      const double z = logits.z[i * p.vocab + j];
      da *= p.logit_scale * (p.softcap > 0 ? 1 - (z / p.softcap) * (z / p.softcap) : 1.0);
      g.d_bias[j] += da;
      add_scaled(g.d_hidden.data() + i * p.dim, da, p.weight.data() + j * p.dim, p.dim);
      add_scaled(g.d_weight.data() + j * p.dim, da, p.hidden.data() + i * p.dim, p.dim);
    }
  }
  return g;
}

OracleGradients oracle_gradients(const OracleProblem& p, const std::vector<double>& upstream) {
  const OracleLogits logits = oracle_logits(p);
  std::vector<double> dz(p.tokens * p.vocab, 0.0);
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    if (oracle_ignored(p, i)) continue;
    const double w = upstream[i] * token_weight(p, i);
    double mass = 0;  // sum of the terms lse - z
    double* row = dz.data() + i * p.vocab;
    for (std::int64_t slot = i * p.per_token; slot < (i + 1) * p.per_token; ++slot) {
      const std::int64_t y = p.targets[slot];
      if (y == p.ignore_index) continue;
      const double c = (1 - p.label_smoothing) * class_weight(p, y) * target_weight(p, slot);
      mass += c;
      row[y] -= w * c;
    }
    if (p.label_smoothing > 0) {
      for (std::int64_t j = 0; j < p.vocab; ++j) {
        const double c = p.label_smoothing / p.vocab * class_weight(p, j);
        mass += c;
        row[j] -= w * c;
      }
    }
    mass += 2 * p.z_loss * logits.lse[i];
    for (std::int64_t j = 0; j < p.vocab; ++j)
      row[j] += w * mass * std::exp(logits.z[i * p.vocab + j] - logits.lse[i]);
  }
  return oracle_chain(p, logits, dz);
}

}  // namespace logitless::test

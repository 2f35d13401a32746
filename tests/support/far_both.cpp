#include "support/far_both.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <utility>

#include "kernels/cpu_head.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTile = 128;
constexpr double kUnit = 6e-8;  // fp32: half a unit of the last place, relative

double to_bf16(double v) {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(v));
  if (!std::isfinite(v)) return v;
  return static_cast<double>(
      std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u));
}
double to_f16(double v) {
  if (!std::isfinite(v) || v == 0.0) return v;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(v) - 10, -24));
  return std::nearbyint(v / unit) * unit;
}
// Range of a rounded number that the library knows to +- error before rounding.
struct Rounded {
  double value, slack;
};
Rounded rounded(double v, double error, DType dtype) {
  if (dtype == DType::f32) return {v, error};
  const auto to = dtype == DType::f16 ? to_f16 : to_bf16;
  const double middle = to(v);
  return {middle, std::max(to(v + error) - middle, middle - to(v - error))};
}
double norm_of(const double* v, std::int64_t n) {
  double sum = 0;
  for (std::int64_t k = 0; k < n; ++k) sum += v[k] * v[k];
  return std::sqrt(sum);
}
void add(double factor, const double* from, std::int64_t n, double* to) {
  for (std::int64_t k = 0; k < n; ++k) to[k] += factor * from[k];
}

// Every tile's mean and centroid in these weights.
struct Tiles {
  Tiles(const OracleProblem& p, const VocabOrder& order, DType dtype)
      : count((p.vocab + kTile - 1) / kTile),
        mean(count * p.dim),
        mean_slack(count * p.dim),
        centroid(count * p.dim, 0.0),
        base(count) {
    for (std::int64_t tile = 0; tile < count; ++tile) {
      const std::int64_t first = tile * kTile, end = std::min(p.vocab, first + kTile);
      double total = 0, top = -INFINITY;
      const auto bias = [&](std::int64_t at) {
        return p.bias.empty() ? 0.0 : p.logit_scale * p.bias[order.vocab_ids()[at]];
      };
      for (std::int64_t at = first; at < end; ++at) top = std::max(top, bias(at));
      const double from = std::isfinite(top) ? top : 0.0;
      for (std::int64_t at = first; at < end; ++at) total += std::exp(bias(at) - from);
      base[tile] = from + std::log(total);
      std::vector<double> sum(p.dim, 0.0), size(p.dim, 0.0);
      for (std::int64_t at = first; at < end; ++at) {
        const double* w = p.weight.data() + order.vocab_ids()[at] * p.dim;
        const double share = total > 0 ? std::exp(bias(at) - from) / total : 0.0;
        add(static_cast<double>(order.share()[at]), w, p.dim, centroid.data() + tile * p.dim);
        for (std::int64_t k = 0; k < p.dim; ++k) {
          sum[k] += share * w[k];
          size[k] += share * std::abs(w[k]);
        }
      }
      for (std::int64_t k = 0; k < p.dim; ++k) {
        // A sum of at most 128 products in fp32.
        const Rounded r = rounded(sum[k], (end - first + 2) * kUnit * size[k], dtype);
        mean[tile * p.dim + k] = r.value;
        mean_slack[tile * p.dim + k] = r.slack;
      }
      centroid_size.push_back(norm_of(centroid.data() + tile * p.dim, p.dim));
    }
  }
  std::int64_t count;
  std::vector<double> mean, mean_slack, centroid, base, centroid_size;
};

// Estimates the log masses of one token, and their rounding slack. Means are in far_dtype; of f16
// the forms have tokens and moments in bf16.
void estimate(const OracleProblem& p, const VocabOrder& order, const Tiles& tiles, DType far_dtype,
              std::int64_t token, std::vector<double>& value, std::vector<double>& slack) {
  const DType dtype = far_dtype == DType::f16 ? DType::bf16 : far_dtype;
  const std::int64_t dim = p.dim;
  const double* x = p.hidden.data() + token * dim;
  const double s = p.logit_scale, sums = (static_cast<double>(dim) + 4) * kUnit;
  std::vector<Rounded> square;
  for (std::int64_t a = 0; a < dim; ++a) {
    double along = 0, size = 0;
    for (std::int64_t k = 0; k < dim; ++k) {
      const double axis = rounded(static_cast<double>(order.axes()[a * dim + k]), 0.0, dtype).value;
      const double of_token = far_dtype == DType::f16 ? to_bf16(x[k]) : x[k];
      along += of_token * axis;
      size += std::abs(of_token * axis);
    }
    const double error = sums * size;
    square.push_back(rounded(along * along, 2 * std::abs(along) * error + error * error, dtype));
  }
  for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
    double linear = 0, form = 0, error = 0;
    for (std::int64_t k = 0; k < dim; ++k) {
      const double mean = tiles.mean[tile * dim + k];
      const double variance =
          rounded(static_cast<double>(order.variance()[tile * dim + k]), 0.0, dtype).value;
      linear += s * x[k] * mean;
      form += 0.5 * s * s * variance * square[k].value;
      error += std::abs(s * x[k]) * (tiles.mean_slack[tile * dim + k] + sums * std::abs(mean)) +
               0.5 * s * s * variance * (square[k].slack + sums * square[k].value);
    }
    value[tile] = tiles.base[tile] + linear + form;
    slack[tile] = std::isfinite(value[tile])
                      ? error + 4 * kUnit * (std::abs(tiles.base[tile]) + std::abs(linear) + form)
                      : 0.0;
  }
}

double log_sum(const std::vector<double>& v) {
  const double top = *std::max_element(v.begin(), v.end());
  double sum = 0;
  for (const double x : v) sum += std::exp(x - top);
  return top + std::log(sum);
}

// One token's loss is sum_j pull_j (lse - z_j) + zeta lse^2, times its weight.
struct Token {
  Token(const OracleProblem& p, std::int64_t i) : pull(p.vocab, 0.0), target(p.vocab, false) {
    const auto class_weight = [&](std::int64_t j) {
      return p.class_weight.empty() ? 1.0 : p.class_weight[j];
    };
    weight = p.token_weight.empty() ? 1.0 : p.token_weight[i];
    for (std::int64_t j = 0; j < p.vocab && p.label_smoothing > 0; ++j)
      pull[j] = p.label_smoothing / static_cast<double>(p.vocab) * class_weight(j);
    for (std::int64_t slot = i * p.per_token; slot < (i + 1) * p.per_token; ++slot) {
      const std::int64_t y = p.targets[slot];
      if (y == p.ignore_index) continue;
      target[y] = true;
      pull[y] += (1 - p.label_smoothing) * class_weight(y) *
                 (p.target_weight.empty() ? 1.0 : p.target_weight[slot]);
    }
    for (const double v : pull) total += v;
  }
  std::vector<double> pull;
  std::vector<bool> target;
  double weight = 1, total = 0;
};

}  // namespace

FarBothOracle far_both_oracle(const OracleProblem& p, const std::vector<double>& upstream,
                              const VocabOrder& order, const FarGrid& grid, DType far_dtype,
                              double tau, std::vector<MassRange>* masses) {
  const std::int64_t dim = p.dim;
  const Tiles tiles(p, order, far_dtype);
  FarBothOracle out;
  out.logits = oracle_logits(p);
  if (tau > 0) out.exact = oracle_gradients(p, upstream);
  for (auto* v : {&out.lse, &out.lse_slack, &out.losses, &out.losses_slack})
    v->assign(p.tokens, 0.0);
  out.far.d_hidden.assign(p.tokens * dim, 0.0);
  out.far.d_weight.assign(p.vocab * dim, 0.0);
  out.far.d_bias.assign(p.vocab, 0.0);
  out.mean_d_weight.assign(p.vocab * dim, 0.0);
  out.nearest = INFINITY;
  std::vector<double> weight_slack(p.vocab, 0.0), bias_slack(p.vocab, 0.0);
  double hidden_slack = 0;
  std::int64_t selected_pairs = 0, pairs = 0;
  const auto end_of = [&](std::int64_t tile) { return std::min(p.vocab, (tile + 1) * kTile); };
  for (const auto& chunk : far_blocks(p, order, grid)) {
    // Indices are [block][token][tile], and [block][tile].
    std::vector<std::vector<std::vector<double>>> value(chunk.size()), slack(chunk.size());
    std::vector<std::vector<bool>> selected(chunk.size());
    std::int64_t count = 0;
    for (std::size_t b = 0; b < chunk.size(); ++b) {
      std::vector<double> largest(tiles.count, -INFINITY), unsure(tiles.count, 0.0);
      selected[b].assign(tiles.count, false);
      for (const std::int64_t i : chunk[b]) {
        auto& v = value[b].emplace_back(tiles.count);
        auto& e = slack[b].emplace_back(tiles.count);
        estimate(p, order, tiles, far_dtype, i, v, e);
        const double total = log_sum(v), most = *std::max_element(e.begin(), e.end());
        for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
          const double mass =
              v[tile] + static_cast<double>(order.log2_caution()[tile]) * std::log(2.0) - total;
          largest[tile] = std::max(largest[tile], mass);
          unsure[tile] = std::max(unsure[tile], e[tile] + most);
        }
        for (std::int64_t k = i * p.per_token; k < (i + 1) * p.per_token; ++k) {
          if (p.targets[k] == p.ignore_index) continue;
          const double share = out.logits.z[i * p.vocab + p.targets[k]] - total;
          if (grid.only_likely_targets && share <= std::log(tau)) continue;
          selected[b][order.positions()[p.targets[k]] / kTile] = true;
        }
      }
      for (std::int64_t first = 0; first < tiles.count; first += grid.tiles) {
        const std::int64_t end = std::min(tiles.count, first + grid.tiles);
        const double most = *std::max_element(largest.begin() + first, largest.begin() + end);
        const double loose = *std::max_element(unsure.begin() + first, unsure.begin() + end);
        const bool target = std::find(selected[b].begin() + first, selected[b].begin() + end,
                                      true) != selected[b].begin() + end;
        for (std::int64_t tile = first; tile < end; ++tile) {
          largest[tile] = most;
          unsure[tile] = loose;
          selected[b][tile] = target;
        }
      }
      for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
        if (tile % grid.tiles != 0) {
          selected[b][tile] = selected[b][tile - 1];
          continue;
        }
        if (!selected[b][tile]) {
          if (masses != nullptr)
            masses->push_back(
                {std::exp(largest[tile] - unsure[tile]), std::exp(largest[tile] + unsure[tile])});
          selected[b][tile] = largest[tile] > std::log(tau);
          out.nearest =
              std::min(out.nearest, std::abs(largest[tile] - std::log(tau)) - unsure[tile]);
        }
        count += selected[b][tile] ? 1 : 0;
      }
    }
    if (tau <= 0) continue;
    const auto all =
        static_cast<std::int64_t>(chunk.size()) * ((tiles.count + grid.tiles - 1) / grid.tiles);
    const bool fall_back =
        static_cast<double>(count) > grid.most_selected * static_cast<double>(all);
    if (fall_back) {
      count = all;
      for (auto& k : selected) k.assign(tiles.count, true);
    }
    out.fallback = out.fallback || fall_back;
    selected_pairs += count;
    pairs += all;
    for (std::size_t b = 0; b < chunk.size(); ++b) {
      for (std::size_t t = 0; t < chunk[b].size(); ++t) {
        const std::int64_t i = chunk[b][t];
        const double* x = p.hidden.data() + i * dim;
        const double* z = out.logits.z.data() + i * p.vocab;
        const double x_size = norm_of(x, dim);
        std::vector<double> parts, error;
        for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
          error.push_back(0);
          if (!selected[b][tile]) {
            parts.push_back(value[b][t][tile]);
            error.back() = grid.mass_error + std::expm1(slack[b][t][tile]);
          }
          for (std::int64_t at = tile * kTile; at < end_of(tile) && selected[b][tile]; ++at)
            parts.push_back(z[order.vocab_ids()[at]]);
        }
        const double lse = log_sum(parts);
        double loose = 0;
        for (std::int64_t tile = 0; tile < tiles.count; ++tile)
          if (!selected[b][tile]) loose += std::exp(value[b][t][tile] - lse) * error[tile];
        out.lse[i] = lse;
        out.lse_slack[i] = loose;
        const Token token(p, i);
        double loss = p.z_loss * lse * lse;
        for (std::int64_t j = 0; j < p.vocab; ++j)
          if (token.pull[j] != 0) loss += token.pull[j] * (lse - z[j]);
        out.losses[i] = token.weight * loss;
        out.losses_slack[i] =
            token.weight * (token.total + 2 * p.z_loss * (std::abs(lse) + loose)) * loose;

        const double up = upstream[i] * token.weight * p.logit_scale;
        const double alpha = up * (token.total + 2 * p.z_loss * lse);
        // Relative slack of the softmax part, from lse.
        const double turn =
            loose + (alpha != 0 ? std::abs(up * 2 * p.z_loss * loose / alpha) : 0.0);
        std::vector<double> soft_row(dim, 0.0);
        double* d_hidden = out.far.d_hidden.data() + i * dim;
        double own = 0;
        for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
          double mass = selected[b][tile] ? 0.0 : std::exp(value[b][t][tile] - lse);
          for (std::int64_t at = tile * kTile; at < end_of(tile) && mass > 0; ++at) {
            const std::int64_t j = order.vocab_ids()[at];
            if (token.target[j]) mass = std::max(mass - std::exp(z[j] - lse), 0.0);
          }
          const double far = alpha * mass;
          for (std::int64_t at = tile * kTile; at < end_of(tile); ++at) {
            const std::int64_t j = order.vocab_ids()[at];
            const double share = static_cast<double>(order.share()[at]);
            const bool exact = selected[b][tile] || token.target[j];
            const double own_soft = exact ? alpha * std::exp(z[j] - lse) : 0.0;
            const double soft = own_soft + share * far;
            const double da = soft - up * token.pull[j];
            const double* w = p.weight.data() + j * dim;
            if (exact) add(own_soft, w, dim, soft_row.data());
            add(-up * token.pull[j], w, dim, d_hidden);
            add(da, x, dim, out.far.d_weight.data() + j * dim);
            out.far.d_bias[j] += da;
            const double lost = std::abs(soft) * (turn + error[tile]);
            weight_slack[j] += lost * x_size;
            bias_slack[j] += lost;
          }
          if (selected[b][tile]) continue;
          add(far, tiles.centroid.data() + tile * dim, dim, soft_row.data());
          own += std::abs(far) * error[tile] * tiles.centroid_size[tile];
        }
        for (std::int64_t first = 0; first < tiles.count; first += grid.tiles) {
          const std::int64_t end = std::min(tiles.count, first + grid.tiles);
          double exact = 0, estimated = 0;
          for (std::int64_t tile = first; tile < end; ++tile) {
            estimated += std::exp(value[b][t][tile] - lse);
            for (std::int64_t at = tile * kTile; at < end_of(tile); ++at)
              exact += std::exp(z[order.vocab_ids()[at]] - lse);
          }
          double total = 1.0;
          if (!selected[b][first]) {
            total += exact - estimated;
            if (alpha != 0) out.of_sample.add({1.0, std::pow(exact - estimated, 2), exact});
          }
          for (std::int64_t at = first * kTile; at < end_of(end - 1); ++at) {
            const std::int64_t j = order.vocab_ids()[at];
            const double soft = alpha * std::exp(z[j] - lse) / (token.target[j] ? 1.0 : total);
            add(soft - up * token.pull[j], x, dim, out.mean_d_weight.data() + j * dim);
          }
        }
        add(1.0, soft_row.data(), dim, d_hidden);
        hidden_slack += std::pow(own + turn * norm_of(soft_row.data(), dim), 2);
      }
    }
  }
  out.selected = pairs > 0 ? static_cast<double>(selected_pairs) / static_cast<double>(pairs) : 1.0;
  out.hidden_slack = std::sqrt(hidden_slack);
  out.weight_slack = norm(weight_slack);
  out.bias_slack = norm(bias_slack);
  return out;
}

FarBothProblem::FarBothProblem(const HeadSpec& s, double span) : FarProblem(s, span) {
  std::mt19937_64 random(s.seed + 11);
  const std::int64_t tiles = (s.vocab + kTile - 1) / kTile;
  for (std::int64_t slot = 0; slot < targets.numel(); ++slot) {
    if (oracle.targets[slot] == oracle.ignore_index) continue;
    const std::int64_t tile =
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>((tiles + 4) / 5)) * 5;
    const std::int64_t vocab_count = std::min(kTile, s.vocab - tile * kTile);
    targets.set(slot,
                static_cast<double>(
                    order.vocab_ids()[tile * kTile +
                                      static_cast<std::int64_t>(
                                          random() % static_cast<std::uint64_t>(vocab_count))]));
  }
  refresh_oracle();
  measure();
}

void FarBothProblem::measure(double caution) {
  const VocabOrder measured = measure_tiles(
      Context(), order, std::as_const(hidden).view(), std::as_const(weight).view(),
      spec.bias ? std::as_const(bias).view() : ConstTensorView(), spec.logit_scale, 0.02f);
  std::mt19937_64 random(spec.seed + 13);
  std::uniform_real_distribution<float> uniform;
  std::vector<float> variance(measured.variance().begin(), measured.variance().end());
  for (float& v : variance) v *= 1.0f + 2.0f * uniform(random);
  std::vector<float> cautions;
  for (std::size_t i = 0; i < measured.log2_caution().size(); ++i)
    cautions.push_back(static_cast<float>(caution) * uniform(random));
  order = order.with_moments(spec.dim, measured.axes(), variance, cautions);
}

FarBothResult call_far_both(const FarBothProblem& problem, RunSpec run) {
  FarBothResult out;
  const auto change = run.change;
  run.plan = PlanKind::far_both;
  run.change = [&](CrossEntropyOptions& o, CrossEntropyInputs& in, CrossEntropyOutputs& to) {
    in.order = problem.order;
    if (change) change(o, in, to);
  };
  static_cast<HeadResult&>(out) = run_head(problem, run);
  out.tau = static_cast<double>(run.tau);
  return out;
}

// Returns a tau, in a gap, that selects about `fraction` of the pairs.
static float both_tau(std::vector<MassRange> masses, double fraction) {
  std::sort(masses.begin(), masses.end(),
            [](const MassRange& a, const MassRange& b) { return a.low > b.low; });
  const auto count = static_cast<std::int64_t>(masses.size());
  std::vector<double> rest(count + 1, 0.0);  // largest of the remaining ones
  for (std::int64_t at = count; at-- > 0;) rest[at] = std::max(rest[at + 1], masses[at].high);
  const auto wanted = std::clamp<std::int64_t>(
      static_cast<std::int64_t>(fraction * static_cast<double>(count)), 1, count - 1);
  // Finds the nearest position with a gap of 5 %, below 1.
  for (std::int64_t away = 0; away < count; ++away) {
    for (const std::int64_t at : {wanted - away, wanted + away}) {
      if (at < 1 || at >= count || rest[at] > 0.9 || masses[at - 1].low < 1.05 * rest[at]) continue;
      const double low = std::max(rest[at], masses[at - 1].low * 0.5);
      return static_cast<float>(std::sqrt(low * std::min(masses[at - 1].low, 1.0)));
    }
  }
  return 0.0f;
}

FarBothResult run_far_both(const FarBothProblem& problem, RunSpec run, double fraction) {
  const std::vector<double> upstream = upstream_of(problem, run);
  FarGrid grid;
  const auto oracle = [&](double tau, std::vector<MassRange>* masses) {
    return far_both_oracle(
        problem.oracle, upstream, problem.order, grid,
        is_device_kernel(run.kernel) ? problem.spec.dtype : find_head_kernel(run.kernel).far_dtype,
        tau, masses);
  };
  const auto result = [&] {
    FarBothResult out = call_far_both(problem, run);
    grid = far_grid(out);
    out.oracle = oracle(out.tau, nullptr);
    return out;
  };
  if (run.tau != 0.0f) return result();
  RunSpec trial = run;
  trial.tau = 0.02f;
  trial.audit_rows = 0;
  grid = far_grid(call_far_both(problem, trial));
  for (int cuts = 0;;) {  // as in run_far
    std::vector<MassRange> masses;
    oracle(0.0, &masses);
    run.tau = both_tau(masses, fraction);
    const std::int64_t chunk = grid.chunk_tokens;
    FarBothResult out = result();
    if (grid.chunk_tokens != chunk && ++cuts < 4) continue;
    EXPECT_EQ(grid.chunk_tokens, chunk);
    if (grid.order_of_tokens.empty() || out.oracle.nearest > 0.01 || fraction < 0.05) return out;
    fraction *= 0.9;
  }
}

void expect_far_both(const FarBothProblem& problem, const RunSpec& run, const FarBothResult& a) {
  const OracleProblem& p = problem.oracle;
  const FarBothOracle& o = a.oracle;
  const double contract = gradient_bound(problem.spec.dtype);
  EXPECT_EQ(a.plan.kind, PlanKind::far_both);
  EXPECT_GT(o.nearest, 0.01) << "a mass is too near tau for this test: " << a.tau;
  EXPECT_DOUBLE_EQ(a.statistics.far.selected, o.selected);
  EXPECT_EQ(a.statistics.far.dense_fallback, o.selected == 1.0 || o.fallback);
  EXPECT_EQ(a.statistics.far.bound, -1.0);
  double total = 0, total_slack = 0, mean_lse = 0, lse_slack = 0;
  std::int64_t valid = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const double z = kLseBound * (1 + std::abs(o.lse[i]));
    EXPECT_NEAR(a.lse.get(i), o.lse[i], o.lse_slack[i] + z) << "token " << i;
    if (problem.spec.reduction == Reduction::none) {
      EXPECT_NEAR(a.loss.get(i), o.losses[i],
                  o.losses_slack[i] + 1e-5 * (1 + std::abs(o.losses[i])))
          << "token " << i;
    }
    if (a.log_prob.defined() && !oracle_ignored(p, i)) {
      const double logit = o.logits.z[i * p.vocab + p.targets[i]];
      EXPECT_NEAR(a.target_logit.get(i), logit, z) << "token " << i;
      EXPECT_NEAR(a.log_prob.get(i), logit - o.lse[i], o.lse_slack[i] + 3 * z) << "token " << i;
    }
    total += o.losses[i];
    total_slack += o.losses_slack[i];
    if (oracle_ignored(p, i)) continue;
    ++valid;
    mean_lse += o.lse[i];
    lse_slack += o.lse_slack[i];
  }
  if (valid > 0) {
    EXPECT_NEAR(a.statistics.mean_lse, mean_lse / valid,
                lse_slack / valid + kLseBound * (1 + std::abs(mean_lse / valid)));
  }
  if (problem.spec.reduction != Reduction::none) {
    const double divisor = problem.spec.reduction == Reduction::mean ? oracle_normalizer(p) : 1.0;
    EXPECT_NEAR(a.loss.get(0), total / divisor,
                total_slack / divisor + 2e-6 * (1 + std::abs(total / divisor)));
  }
  const auto compare = [&](const char* name, const Tensor& got, const std::vector<double>& want,
                           double slack) {
    if (!got.defined()) return;
    EXPECT_LE(distance(got.values(), want), slack + contract * norm(want)) << name;
  };
  compare("d_hidden", a.d_hidden, o.far.d_hidden, o.hidden_slack);
  compare("d_weight", a.d_weight, o.far.d_weight, o.weight_slack);
  compare("d_bias", a.d_bias, o.far.d_bias, o.bias_slack);
  EXPECT_EQ(a.d_hidden.defined(), run.gradients && run.d_hidden);
}

}  // namespace logitless::test

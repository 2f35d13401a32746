// The loss and its gradients in float64 with every logit in memory: the reference of all tests.
// Written independently of the library, from the formulas of the public headers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace logitless::test {

struct OracleProblem {
  std::int64_t tokens = 0, dim = 0, vocab = 0;
  int per_token = 1;
  std::vector<double> hidden, weight;  // [N, D], [V, D]
  std::vector<double> bias;            // [V] or empty
  std::vector<std::int64_t> targets;   // [N, K]
  std::vector<double> class_weight;    // [V] or empty
  std::vector<double> token_weight;    // [N] or empty
  std::vector<double> target_weight;   // [N, K] or empty
  std::int64_t ignore_index = -100;
  double label_smoothing = 0, z_loss = 0, softcap = 0, logit_scale = 1;
};

struct OracleLogits {
  std::vector<double> z;    // [N, V]
  std::vector<double> lse;  // [N]
};

OracleLogits oracle_logits(const OracleProblem& p);
bool oracle_ignored(const OracleProblem& p, std::int64_t token);
// Loss of one token, 0 where ignored, given its row of logits [V]. It is a function of the logits
// alone, so that its derivative can be computed by differences.
double oracle_token_loss(const OracleProblem& p, std::int64_t token, const double* z);
// Divisor of reduction mean.
double oracle_normalizer(const OracleProblem& p);

struct OracleGradients {
  std::vector<double> d_hidden, d_weight, d_bias;
};
// Gradients of sum_i upstream_i * loss_i.
OracleGradients oracle_gradients(const OracleProblem& p, const std::vector<double>& upstream);
// Gradients from dz [N, V].
OracleGradients oracle_chain(const OracleProblem& p, const OracleLogits& logits,
                             const std::vector<double>& dz);

}  // namespace logitless::test

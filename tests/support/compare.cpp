#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu_head.h"
#include "kernels/device/kernel.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {

double gradient_bound(DType dtype) { return dtype == DType::f32 ? 1e-5 : 4e-3; }

void expect_matches_oracle(const HeadProblem& problem, const RunSpec& run) {
  expect_matches_oracle(problem, run, run_head(problem, run));
}

void expect_matches_oracle(const HeadProblem& problem, const RunSpec& run,
                           const HeadResult& result) {
  const OracleProblem& p = problem.oracle;
  const OracleLogits logits = oracle_logits(p);
  std::vector<double> losses;
  std::vector<double> lse;
  double total = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    losses.push_back(oracle_token_loss(p, i, logits.z.data() + i * p.vocab));
    lse.push_back(oracle_ignored(p, i) ? 0.0 : logits.lse[i]);
    total += losses.back();
  }
  const double divisor = problem.spec.reduction == Reduction::mean ? oracle_normalizer(p) : 1.0;
  const double scale = divisor == 0.0 ? 0.0 : run.grad_loss / divisor;
  EXPECT_LE(relative_error(result.lse.values(), lse), kLseBound);
  if (problem.spec.reduction == Reduction::none) {
    EXPECT_LE(relative_error(result.loss.values(), losses), 1e-5);
  } else {
    const double loss = divisor == 0.0 ? 0.0 : total / divisor;
    EXPECT_NEAR(result.loss.get(0), loss, 2e-6 * (1 + std::abs(loss)));
  }
  if (!run.gradients) return;
  std::vector<double> upstream(static_cast<std::size_t>(p.tokens), scale);
  if (!run.grad_losses.empty()) upstream = run.grad_losses;
  const OracleGradients g = oracle_gradients(p, upstream);
  const auto compare = [&](const char* name, const Tensor& got, const std::vector<double>& exact) {
    if (!got.defined()) return;
    const double bound =
        std::max(gradient_bound(problem.spec.dtype), gradient_bound(got.view().dtype()));
    EXPECT_LE(relative_error(got.values(), exact), bound) << name;
  };
  compare("d_hidden", result.d_hidden, g.d_hidden);
  compare("d_weight", result.d_weight, g.d_weight);
  compare("d_bias", result.d_bias, g.d_bias);
}

bool accepts(const std::string& kernel, const HeadSpec& spec) {
  HeadFeatures features;
  const HeadShape shape{spec.tokens, spec.dim, spec.vocab, spec.dtype};
  if (is_device_kernel(kernel)) {
    return cuda::find_device_kernel(kernel)
        .unsupported({spec.tokens, spec.dim, spec.vocab, spec.dtype, spec.per_token})
        .empty();
  }
  return find_head_kernel(kernel).supports(shape, features).empty();
}

bool offers(const std::string& kernel, PlanKind kind) {
  if (kernel == "reference") return kind == PlanKind::recompute;
  return true;
}

double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  const double error = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
  return std::isnan(error) ? INFINITY : error;
}

}  // namespace logitless::test

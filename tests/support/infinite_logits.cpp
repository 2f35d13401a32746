#include "support/infinite_logits.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kInfinite = 140, kAlsoInfinite = 299;

bool is_infinite(std::int64_t token) { return token % 3 == 0; }

}  // namespace

HeadProblem infinite_problem(DType dtype, bool nan) {
  HeadSpec spec;
  spec.tokens = 40;
  spec.dim = 8;
  spec.vocab = 300;
  spec.dtype = dtype;
  spec.bias = true;
  spec.reduction = Reduction::none;
  HeadProblem problem(spec);
  for (std::int64_t i = 0; i < spec.tokens; ++i) {
    problem.hidden.set(i * spec.dim, is_infinite(i) ? 4.0 : -4.0);
    const std::int64_t of_infinite[] = {kInfinite, 5, kAlsoInfinite, 77};
    problem.targets.set(i, static_cast<double>(is_infinite(i) ? of_infinite[i % 4] : 77));
  }
  for (const std::int64_t j : {kInfinite, kAlsoInfinite}) problem.weight.set(j * spec.dim, 3e38);
  if (nan) problem.bias.set(7, NAN);
  problem.refresh_oracle();
  return problem;
}

void expect_infinite(const HeadProblem& problem, const RunSpec& run, const HeadResult& result) {
  const OracleProblem& p = problem.oracle;
  const OracleLogits exact = oracle_logits(p);
  const OracleGradients gradients =
      oracle_gradients(p, std::vector<double>(static_cast<std::size_t>(p.tokens), 1.0));
  const bool device = is_device_kernel(run.kernel);
  const bool nan = std::isnan(problem.bias.get(7));
  std::vector<double> got, expected;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    SCOPED_TRACE(i);
    if (!is_infinite(i) && !nan) {
      const double lse = exact.lse[static_cast<std::size_t>(i)];
      EXPECT_NEAR(result.lse.get(i), lse, kLseBound * (1 + std::abs(lse)));
      EXPECT_NEAR(result.loss.get(i), oracle_token_loss(p, i, exact.z.data() + i * p.vocab), 1e-5);
      for (std::int64_t at = i * p.dim; run.gradients && at < (i + 1) * p.dim; ++at) {
        got.push_back(result.d_hidden.get(at));
        expected.push_back(gradients.d_hidden[static_cast<std::size_t>(at)]);
      }
      continue;
    }
    if (device) {
      EXPECT_FALSE(std::isfinite(result.lse.get(i)));
      EXPECT_TRUE(std::isnan(result.loss.get(i)));
      for (std::int64_t at = i * p.dim; run.gradients && at < (i + 1) * p.dim; ++at)
        EXPECT_TRUE(std::isnan(result.d_hidden.get(at)));
      continue;
    }
    if (nan) {
      EXPECT_TRUE(std::isnan(result.lse.get(i)));
    } else {
      EXPECT_EQ(result.lse.get(i), INFINITY);
      if (result.argmax.defined()) {
        EXPECT_EQ(result.argmax.get(i), kInfinite);
      }
    }
    EXPECT_TRUE(std::isnan(result.loss.get(i)));
    EXPECT_TRUE(std::isnan(result.log_prob.get(i)));
    if (result.entropy.defined()) {
      EXPECT_TRUE(std::isnan(result.entropy.get(i)));
    }
    for (std::int64_t at = i * p.dim; run.gradients && at < (i + 1) * p.dim; ++at)
      EXPECT_TRUE(std::isnan(result.d_hidden.get(at)));
  }
  EXPECT_LE(relative_error(got, expected), gradient_bound(problem.spec.dtype));
  if (!run.gradients || device) return;
  for (const double g : result.d_weight.values()) EXPECT_TRUE(std::isnan(g));
  for (const double g : result.d_bias.values()) EXPECT_TRUE(std::isnan(g));
}

}  // namespace logitless::test

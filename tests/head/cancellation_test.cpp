// Gradients whose parts cancel: the error is bounded by the size of the parts, not of their sum
// (docs/explain/losses.md).
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

double norm(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum);
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> difference(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return norm(difference);
}

// Returns sum_j m_ij
// w_j
// and sum_i m_ij
// x_i
// , where m_ij = p_ij + eps / V, or the target's coefficient.
OracleGradients parts_of(const HeadProblem& problem) {
  OracleProblem p = problem.oracle;
  const OracleLogits logits = oracle_logits(p);
  const double eps = p.label_smoothing, each = eps / static_cast<double>(p.vocab);
  std::vector<double> magnitudes(logits.z.size());
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    for (std::int64_t j = 0; j < p.vocab; ++j) {
      const auto at = static_cast<std::size_t>(i * p.vocab + j);
      const double probability = std::exp(logits.z[at] - logits.lse[static_cast<std::size_t>(i)]);
      const bool target = p.targets[static_cast<std::size_t>(i)] == j;
      magnitudes[at] = target ? std::abs(probability - each - (1.0 - eps)) : probability + each;
    }
  }
  for (auto* values : {&p.hidden, &p.weight})
    for (double& v : *values) v = std::abs(v);
  return oracle_chain(p, logits, magnitudes);
}

class CancellationTest : public testing::TestWithParam<std::string> {
 protected:
  static void expect_within_parts(const HeadProblem& problem) {
    const OracleGradients parts = parts_of(problem);
    const OracleGradients exact = oracle_gradients(
        problem.oracle, std::vector<double>(static_cast<std::size_t>(problem.spec.tokens), 1.0));
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      if (!offers(GetParam(), kind)) continue;
      RunSpec r;
      r.kernel = GetParam();
      r.plan = kind;
      const HeadResult result = run_head(problem, r);
      const double bound = gradient_bound(problem.spec.dtype);
      EXPECT_LE(distance(result.d_hidden.values(), exact.d_hidden), bound * norm(parts.d_hidden));
      EXPECT_LE(distance(result.d_weight.values(), exact.d_weight), bound * norm(parts.d_weight));
    }
  }
};

TEST_P(CancellationTest, ErrorsAreOfTheParts) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t vocab : {2, 3, 5, 300}) {
      for (const float smoothing : {0.0f, 0.5f, 1.0f}) {
        for (const bool constant : {true, false}) {
          HeadSpec spec;
          spec.tokens = 33;
          spec.dim = 16;
          spec.vocab = vocab;
          spec.dtype = dtype;
          spec.reduction = Reduction::sum;
          spec.label_smoothing = smoothing;
          if (!accepts(GetParam(), spec)) continue;
          SCOPED_TRACE(describe(spec) + (constant ? ", constant logits" : ""));
          HeadProblem problem(spec);
          if (constant) {
            for (std::int64_t j = 1; j < vocab; ++j)
              for (std::int64_t k = 0; k < spec.dim; ++k)
                problem.weight.set(j * spec.dim + k, problem.weight.get(k));
            problem.refresh_oracle();
          }
          expect_within_parts(problem);
        }
      }
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CancellationTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, CancellationTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test

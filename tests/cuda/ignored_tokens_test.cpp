// Ignored tokens on a GPU: chunks have the tokens with a target first, so results are those of a
// call with these tokens alone. And a token's bits do not depend on the tokens beside it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

HeadSpec spec_of(DType dtype) {
  HeadSpec s;
  s.tokens = 2300;
  s.dim = 136;
  s.vocab = 1500;
  s.dtype = dtype;
  s.bias = true;
  s.weight_scale = 3.0;
  s.ignored = 0.0;
  return s;
}

class IgnoredTokens : public testing::TestWithParam<std::string> {};

// Returns a problem with the tokens `kept` of another.
HeadProblem only(const HeadProblem& of, const std::vector<std::int64_t>& kept) {
  HeadSpec spec = of.spec;
  spec.tokens = static_cast<std::int64_t>(kept.size());
  HeadProblem problem(spec);
  for (std::int64_t i = 0; i < spec.tokens; ++i) {
    const std::int64_t from = kept[static_cast<std::size_t>(i)];
    for (std::int64_t k = 0; k < spec.dim; ++k)
      problem.hidden.set(i * spec.dim + k, of.hidden.get(from * spec.dim + k));
    problem.targets.set(i, of.targets.get(from));
  }
  for (std::int64_t j = 0; j < spec.vocab * spec.dim; ++j) problem.weight.set(j, of.weight.get(j));
  for (std::int64_t j = 0; j < spec.vocab; ++j) problem.bias.set(j, of.bias.get(j));
  problem.refresh_oracle();
  return problem;
}

TEST_P(IgnoredTokens, GiveWhatACallWithoutThemGives) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    if (!accepts(GetParam(), spec_of(dtype))) continue;
    for (const int counting : {0, 1, 4, 9}) {  // of ten tokens
      HeadProblem problem(spec_of(dtype));
      std::vector<std::int64_t> kept;
      for (std::int64_t i = 0; i < problem.spec.tokens; ++i) {
        if (i * 7 % 10 < counting) {
          kept.push_back(i);
        } else {
          problem.targets.set(i, -100.0);
          if (i % 3 == 0) problem.hidden.set(i * problem.spec.dim + 5, NAN);
        }
      }
      problem.refresh_oracle();
      for (const PlanKind kind : {PlanKind::dense, PlanKind::stored, PlanKind::recompute}) {
        if (!offers(GetParam(), kind)) continue;
        SCOPED_TRACE(testing::Message()
                     << name_of(dtype) << " " << counting << " " << std::string(name_of(kind)));
        RunSpec run;
        run.kernel = GetParam();
        run.plan = kind;
        run.extras = true;
        const HeadResult result = run_head(problem, run);
        for (std::int64_t i = 0; i < problem.spec.tokens; ++i) {
          if (problem.targets.get(i) >= 0) continue;
          ASSERT_EQ(result.lse.get(i), 0.0);
          for (std::int64_t k = 0; k < problem.spec.dim; ++k)
            ASSERT_EQ(result.d_hidden.get(i * problem.spec.dim + k), 0.0) << i;
        }
        if (counting == 0) {
          for (const double g : result.d_weight.values()) ASSERT_EQ(g, 0.0);
          continue;
        }
        const HeadProblem alone = only(problem, kept);
        const HeadResult expected = run_head(alone, run);
        const double bound = gradient_bound(dtype);
        EXPECT_LE(relative_error(result.d_weight.values(), expected.d_weight.values()), bound);
        EXPECT_LE(relative_error(result.d_bias.values(), expected.d_bias.values()), bound);
        EXPECT_NEAR(result.loss.get(0), expected.loss.get(0), 1e-6 * expected.loss.get(0));
        std::vector<double> d_hidden;
        for (std::size_t i = 0; i < kept.size(); ++i) {
          const std::int64_t token = kept[i];
          const auto row = static_cast<std::int64_t>(i);
          ASSERT_NEAR(result.lse.get(token), expected.lse.get(row),
                      2e-6 * (1 + std::abs(expected.lse.get(row))));
          ASSERT_NEAR(result.entropy.get(token), expected.entropy.get(row),
                      2e-5 * (1 + std::abs(expected.lse.get(row))));
          ASSERT_EQ(result.argmax.get(token), expected.argmax.get(row));
          for (std::int64_t k = 0; k < problem.spec.dim; ++k)
            d_hidden.push_back(result.d_hidden.get(token * problem.spec.dim + k));
        }
        EXPECT_LE(relative_error(d_hidden, expected.d_hidden.values()), bound);
        const HeadResult again = run_head(problem, run);
        EXPECT_EQ(again.d_hidden.bytes(), result.d_hidden.bytes());
        EXPECT_EQ(again.d_weight.bytes(), result.d_weight.bytes());
      }
    }
  }
}

// The plan expects as many tokens as count, fewer or more of them, or none. 1500 entries end in a
// part of a tile, and few tokens leave parts of a strip of 768 rows to parts of the vocabulary.
TEST_P(IgnoredTokens, ExpectationsChangeTheOrderOfSumsAlone) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    if (!accepts(GetParam(), spec_of(dtype))) continue;
    for (const int counting : {0, 1, 4, 10}) {  // of ten tokens
      HeadProblem problem(spec_of(dtype));
      for (std::int64_t i = 0; i < problem.spec.tokens; ++i) {
        if (i * 7 % 10 < counting) continue;
        problem.targets.set(i, -100.0);
        problem.hidden.set(i * problem.spec.dim + 5, NAN);
      }
      problem.refresh_oracle();
      for (const PlanKind kind : {PlanKind::dense, PlanKind::stored, PlanKind::recompute}) {
        if (!offers(GetParam(), kind)) continue;
        RunSpec run;
        run.kernel = GetParam();
        run.plan = kind;
        const HeadResult plain = run_head(problem, run);
        for (const float expected : {0.6f, 1.0f}) {
          SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << counting << " "
                                          << std::string(name_of(kind)) << " " << expected);
          run.expected_ignored = expected;
          const HeadResult result = run_head(problem, run);
          EXPECT_EQ(result.loss.bytes(), plain.loss.bytes());
          EXPECT_LE(relative_error(result.d_hidden.values(), plain.d_hidden.values()), 1e-4);
          EXPECT_LE(relative_error(result.d_weight.values(), plain.d_weight.values()), 1e-4);
          EXPECT_EQ(result.d_bias.bytes(), plain.d_bias.bytes());
          if (expected < 1.0f) continue;
          const HeadResult again = run_head(problem, run);
          EXPECT_EQ(again.d_hidden.bytes(), result.d_hidden.bytes());
          EXPECT_EQ(again.d_weight.bytes(), result.d_weight.bytes());
        }
      }
    }
  }
}

// Logits of other tokens in the same tiles leave the range of the exponentials, so these tokens are
// computed again, with other references.
TEST_P(IgnoredTokens, ATokensBitsDoNotDependOnItsNeighbours) {
  HeadSpec spec = spec_of(narrow_dtype(GetParam()));
  spec.tokens = 300;
  const HeadProblem calm(spec);
  HeadProblem wild(spec);
  for (std::int64_t i = 0; i < spec.tokens; i += 2) {
    for (std::int64_t k = 0; k < spec.dim; ++k)
      wild.hidden.set(i * spec.dim + k, 40.0 * calm.hidden.get(i * spec.dim + k));
  }
  wild.refresh_oracle();
  for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
    if (!offers(GetParam(), kind)) continue;
    RunSpec run;
    run.kernel = GetParam();
    run.plan = kind;
    run.extras = true;
    const HeadResult a = run_head(calm, run);
    const HeadResult b = run_head(wild, run);
    int repaired = 0;
    for (std::int64_t i = 0; i < spec.tokens; ++i) {
      repaired += std::abs(b.log_prob.get(i)) > 60.0 ? 1 : 0;
      if (i % 2 == 0) continue;
      ASSERT_EQ(a.lse.get(i), b.lse.get(i)) << i;
      ASSERT_EQ(a.log_prob.get(i), b.log_prob.get(i)) << i;
      ASSERT_EQ(a.entropy.get(i), b.entropy.get(i)) << i;
      for (std::int64_t k = 0; k < spec.dim; ++k)
        ASSERT_EQ(a.d_hidden.get(i * spec.dim + k), b.d_hidden.get(i * spec.dim + k)) << i;
    }
    EXPECT_GT(repaired, 10);
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(IgnoredTokens);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, IgnoredTokens, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test

// Heads of several strips of logits on a GPU: sums and stored exponentials across strips whose
// greatest logits differ, and d_weight apart from the other gradients.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "logitless/error.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

class StripsTest : public testing::TestWithParam<std::string> {
 protected:
  // 3 strips of the vocabulary and 2 of the tokens for the cublas kernel.
  HeadSpec spec(DType dtype) const {
    HeadSpec s;
    s.tokens = 2100;
    s.dim = 8;
    s.vocab = 5001;
    s.dtype = dtype;
    s.weight_scale = 2.0;
    s.ignored = 0.1;
    s.bias = true;
    return s;
  }
  RunSpec run(PlanKind kind) const {
    RunSpec r;
    r.kernel = GetParam();
    r.plan = kind;
    r.extras = true;
    return r;
  }
  template <typename F>
  void each_dtype(const F& f) const {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      if (accepts(GetParam(), spec(dtype))) f(dtype);
    }
  }
};

// Each strip has greater logits than the one before, so that stored exponentials are rescaled; or
// smaller ones, so that some have no share; or alike ones.
TEST_P(StripsTest, ReferencesMoveBetweenStrips) {
  each_dtype([&](DType dtype) {
    for (const double step : {0.0, 8.0, 50.0, -8.0, -50.0, 200.0}) {
      HeadProblem problem(spec(dtype));
      for (std::int64_t j = 0; j < problem.spec.vocab; ++j)
        problem.bias.set(j, step * static_cast<double>(j / 2048));
      problem.refresh_oracle();
      for (const PlanKind kind : {PlanKind::dense, PlanKind::stored, PlanKind::recompute}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::string(name_of(kind)) + " " +
                     std::to_string(step));
        expect_matches_oracle(problem, run(kind));
      }
    }
  });
}

TEST_P(StripsTest, MaskedStrips) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  each_dtype([&](DType dtype) {
    for (const std::int64_t masked : {0, 1, 2}) {
      HeadSpec s = spec(dtype);
      s.ignored = 0.0;
      HeadProblem problem(s);
      for (std::int64_t j = 0; j < s.vocab; ++j)
        if (j / 2048 == masked) problem.bias.set(j, -kInfinity);
      for (std::int64_t i = 0; i < s.tokens; ++i) {
        const auto target = static_cast<std::int64_t>(problem.targets.get(i));
        if (target / 2048 == masked)
          problem.targets.set(i, static_cast<double>((target + 2048) % (s.vocab / 2048 * 2048)));
      }
      problem.refresh_oracle();
      for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::string(name_of(kind)) + " " +
                     std::to_string(masked));
        expect_matches_oracle(problem, run(kind));
      }
    }
  });
}

// Sets the hidden states of ignored tokens.
void set_ignored(HeadProblem& problem, double value) {
  for (std::int64_t i = 0; i < problem.spec.tokens; ++i) {
    if (problem.targets.get(i) != -100) continue;
    for (std::int64_t k = 0; k < problem.spec.dim; ++k)
      problem.hidden.set(i * problem.spec.dim + k, value);
  }
}

// Ignored tokens may hold NaN, stored or recomputed, in chunks of their own or among the others.
TEST_P(StripsTest, NanOfIgnoredTokens) {
  each_dtype([&](DType dtype) {
    for (const std::int64_t tokens : {2100, 200}) {
      HeadSpec s = spec(dtype);
      s.tokens = tokens;
      HeadProblem problem(s), clean(s);
      set_ignored(problem, NAN);
      set_ignored(clean, 0.0);
      clean.refresh_oracle();
      for (const PlanKind kind : {PlanKind::dense, PlanKind::stored, PlanKind::recompute}) {
        if (!offers(GetParam(), kind)) continue;
        expect_matches_oracle(clean, run(kind), run_head(problem, run(kind)));
      }
    }
  });
}

// Products of f32 beside 16 bits: rows of the weight are widened for each strip, hidden states for
// each chunk.
TEST_P(StripsTest, F32Beside16Bits) {
  if (!accepts(GetParam(), spec(DType::f32))) GTEST_SKIP() << "no f32";
  HeadSpec s = spec(DType::f32);
  s.label_smoothing = 0.1f;
  HeadSpec weight = s, half = s, hidden = s;
  weight.weight_dtype = DType::bf16;
  half.weight_dtype = DType::f16;
  hidden.hidden_dtype = DType::bf16;
  for (const HeadSpec& of : {weight, half, hidden}) {
    const HeadProblem problem(of);
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      SCOPED_TRACE(describe(of) + " " + std::string(name_of(kind)));
      RunSpec r = run(kind);
      r.gradient_dtype = DType::bf16;
      r.budget = std::size_t{12} << 20;
      const HeadResult result = run_head(problem, r);
      EXPECT_LT(result.plan.chunk_tokens, of.tokens);
      expect_matches_oracle(problem, r, result);
    }
  }
}

// The least plan of a 16-bit d_weight computes it apart. Ignored tokens may hold NaN.
TEST_P(StripsTest, WeightApart) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    HeadSpec s = spec(dtype);
    if (!accepts(GetParam(), s)) continue;
    if (dtype == DType::f32) s.weight_dtype = DType::bf16;
    for (const bool smoothing : {false, true}) {
      s.label_smoothing = smoothing ? 0.1f : 0.0f;
      HeadProblem problem(s), clean(s);
      set_ignored(problem, NAN);
      set_ignored(clean, 0.0);
      clean.refresh_oracle();
      RunSpec r = run(PlanKind::recompute);
      r.gradient_dtype = s.weight_dtype.value_or(dtype);
      r.grad_loss = 3.0;
      HeadResult result;
      for (r.budget = 1 << 20;; r.budget += 1 << 18) {
        try {
          result = run_head(problem, r);
          break;
        } catch (const InvalidArgument&) {
          ASSERT_LT(r.budget, std::size_t{1} << 30);
        }
      }
      EXPECT_GT(result.plan.weight_vocab, 0) << result.plan.explain();
      EXPECT_LT(result.plan.chunk_tokens, s.tokens);
      expect_matches_oracle(clean, r, result);
      r.d_hidden = r.d_bias = false;
      expect_matches_oracle(clean, r, run_head(problem, r));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, StripsTest, testing::ValuesIn(tested_kernels()));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(StripsTest);

}  // namespace
}  // namespace logitless::test

// Cases that other libraries got wrong, on every kernel: sizes, signs, upstream gradients, frozen
// inputs.
#include <gtest/gtest.h>

#include <cmath>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

class CasesTest : public testing::TestWithParam<std::string> {
 protected:
  DType dtype() const { return tested_dtypes(GetParam()).front(); }
  // Compares inputs of each dtype with float64, under the planner's choice and under each plan
  // kind.
  void expect_all(HeadSpec spec, RunSpec run = {}) {
    run.kernel = GetParam();
    for (const DType dtype : tested_dtypes(GetParam())) {
      spec.dtype = dtype;
      if (!accepts(GetParam(), spec)) continue;
      const HeadProblem problem(spec);
      for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute, PlanKind::stored}) {
        if (!offers(GetParam(), kind)) continue;
        SCOPED_TRACE(describe(spec) + " " + std::string(name_of(kind)));
        run.plan = kind;
        expect_matches_oracle(problem, run);
      }
    }
  }
};

TEST_P(CasesTest, PaddingIsNotCountedAsZeroLogits) {
  for (const std::int64_t vocab : {1, 2, 100, 127, 129, 200, 255, 300, 383}) {
    HeadSpec spec;
    spec.tokens = 9;
    spec.dim = 8;
    spec.vocab = vocab;
    spec.weight_scale = 1e-4;
    spec.seed = static_cast<std::uint64_t>(vocab);
    for (const DType dtype : tested_dtypes(GetParam())) {
      spec.dtype = dtype;
      if (!accepts(GetParam(), spec)) continue;
      RunSpec run;
      run.kernel = GetParam();
      const HeadResult result = run_head(HeadProblem(spec), run);
      for (std::int64_t i = 0; i < spec.tokens; ++i)
        EXPECT_NEAR(result.lse.get(i), std::log(static_cast<double>(vocab)), 1e-3);
    }
    if (vocab > 1) expect_all(spec);  // log 1 = 0 has no relative error
  }
}

TEST_P(CasesTest, AllLogitsNegative) {
  HeadSpec spec;
  spec.tokens = 13;
  spec.dim = 16;
  spec.vocab = 150;
  spec.hidden_shift = 2.0;
  spec.weight_shift = -1.0;
  spec.hidden_scale = 0.3;
  const OracleLogits logits = oracle_logits(HeadProblem(spec).oracle);
  for (const double z : logits.z) ASSERT_LT(z, 0.0);
  expect_all(spec);
}

TEST_P(CasesTest, SoftcapThatBites) {
  HeadSpec spec;
  spec.tokens = 15;
  spec.dim = 16;
  spec.vocab = 140;
  spec.weight_scale = 6.0;
  spec.softcap = 2.0f;
  spec.bias = true;
  expect_all(spec);
}

TEST_P(CasesTest, UpstreamGradients) {
  HeadSpec spec;
  spec.tokens = 14;
  spec.dim = 16;
  spec.vocab = 131;
  spec.bias = true;
  spec.ignored = 0.2;
  RunSpec run;
  for (const double upstream : {0.0, -3.0, 1e-3}) {
    run.grad_loss = upstream;
    expect_all(spec, run);
  }
  run.grad_loss = 1.0;
  spec.reduction = Reduction::none;
  for (std::int64_t i = 0; i < spec.tokens; ++i)
    run.grad_losses.push_back(static_cast<float>(0.3 * static_cast<double>(i) - 1.0));
  expect_all(spec, run);
  spec.label_smoothing = 0.2f;
  spec.z_loss = 1e-2f;
  expect_all(spec, run);
}

TEST_P(CasesTest, OneTokenSevenTokensOneColumn) {
  for (const std::int64_t tokens : {1, 7}) {
    for (const std::int64_t dim : {1, 3, 8, 13, 65}) {
      HeadSpec spec;
      spec.tokens = tokens;
      spec.dim = dim;
      spec.vocab = 70;
      spec.weight_scale = 2.0;
      // Rounding errors of a row of three numbers do not average out: this seed avoids a
      // cancellation.
      spec.seed = static_cast<std::uint64_t>(tokens * 100 + dim + 7);
      expect_all(spec);
    }
  }
}

TEST_P(CasesTest, ManyTokensOddInNumber) {
  HeadSpec spec;
  spec.tokens = 8519;
  spec.dim = 8;
  spec.vocab = 33;
  spec.weight_scale = 2.0;
  RunSpec run;
  if (GetParam() == "reference" || GetParam() == "amx_bf16_emulated") {
    spec.tokens = 8519 / 16;  // fewer tokens for slow kernels, still odd
  }
  expect_all(spec, run);
}

TEST_P(CasesTest, FrozenInputs) {
  HeadSpec spec;
  spec.tokens = 19;
  spec.dim = 16;
  spec.vocab = 260;
  spec.bias = true;
  for (const bool d_hidden : {false, true}) {
    for (const bool d_weight : {false, true}) {
      for (const bool d_bias : {false, true}) {
        if (!d_hidden && !d_weight && !d_bias) continue;
        RunSpec run;
        run.d_hidden = d_hidden;
        run.d_weight = d_weight;
        run.d_bias = d_bias;
        expect_all(spec, run);
      }
    }
  }
}

// The target's probability is 0 in fp32, but its loss is finite, and dz is -1 there.
TEST_P(CasesTest, TargetFarBelowTheRest) {
  for (const double far : {80.0, 95.0, 300.0, 3000.0}) {
    HeadSpec spec;
    spec.tokens = 5;
    spec.dim = 8;
    spec.vocab = 280;
    spec.dtype = dtype();
    HeadProblem problem(spec);
    for (std::int64_t i = 0; i < spec.tokens; ++i) problem.hidden.set(i * spec.dim, far);
    for (std::int64_t j = 0; j < spec.vocab; ++j)
      problem.weight.set(j * spec.dim, j < 128 ? -1.0 : 0.0);  // full tile far below
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      problem.targets.set(i, static_cast<double>(i * 20));
    problem.refresh_oracle();
    RunSpec run;
    run.kernel = GetParam();
    expect_matches_oracle(problem, run);
  }
}

TEST_P(CasesTest, LogitsBeyondTheRangeOfExp) {
  HeadSpec spec;
  spec.tokens = 11;
  spec.dim = 8;
  spec.vocab = 300;
  spec.weight_scale = 500.0;
  expect_all(spec);
}

TEST_P(CasesTest, MeanOverAMillionTokens) {
  if (GetParam() == "reference" || GetParam() == "amx_bf16_emulated") return;  // too slow
  HeadSpec spec;
  spec.tokens = 1 << 20;
  spec.dim = 8;
  spec.vocab = 3;
  spec.dtype = narrow_dtype(GetParam());
  RunSpec run;
  run.kernel = GetParam();
  expect_matches_oracle(HeadProblem(spec), run);
}

TEST_P(CasesTest, NoTokensAtAll) {
  HeadSpec spec;
  spec.tokens = 0;
  spec.dim = 8;
  spec.vocab = 9;
  spec.dtype = dtype();
  RunSpec run;
  run.kernel = GetParam();
  const HeadResult result = run_head(HeadProblem(spec), run);
  EXPECT_EQ(result.loss.get(0), 0.0);
  EXPECT_EQ(result.statistics.valid_tokens, 0);
  for (const double g : result.d_weight.values()) EXPECT_EQ(g, 0.0);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CasesTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, CasesTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test

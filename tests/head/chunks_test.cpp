// Results do not depend on how a plan splits a problem: chunks, 16-bit gradients accumulated over
// several of them, and gradients added to present values.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "core/half.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

class ChunksTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "reference") GTEST_SKIP() << "reference has one plan and no chunks";
  }
  static HeadSpec several() {
    HeadSpec spec;
    spec.tokens = 1200;
    spec.dim = 24;
    spec.vocab = 520;
    spec.weight_scale = 3.0;
    spec.bias = true;
    spec.ignored = 0.1;
    return spec;
  }
  // Runs the same problem in one chunk, and in as many as the least budget yields.
  std::pair<HeadResult, HeadResult> large_and_small(const HeadProblem& problem, RunSpec run) const {
    run.kernel = GetParam();
    run.plan = PlanKind::dense;
    run.budget = std::size_t{1} << 30;
    if (!is_device_kernel(run.kernel)) run.chunk_tokens = problem.spec.tokens;
    HeadResult large = run_head(problem, run);
    EXPECT_GE(large.plan.chunk_tokens, problem.spec.tokens);
    run.chunk_tokens = 0;
    run.budget = least_budget(problem, run);
    HeadResult small = run_head(problem, run);
    EXPECT_LT(small.plan.chunk_tokens * 2, problem.spec.tokens);
    return {std::move(large), std::move(small)};
  }
  // Returns the least budget that dense fits in, by bisection.
  static std::size_t least_budget(const HeadProblem& problem, RunSpec run) {
    std::size_t low = 0;
    std::size_t high = run.budget;
    while (high - low > 64) {
      const std::size_t middle = low + (high - low) / 2;
      run.budget = middle;
      if (fits(problem, run)) {
        high = middle;
      } else {
        low = middle;
      }
    }
    return high;
  }
  static bool fits(const HeadProblem& problem, const RunSpec& run) {
    HeadFeatures features;
    features.bias = features.d_hidden = features.d_weight = features.d_bias = true;
    const DType gradient = run.gradient_dtype.value_or(DType::f32);
    features.d_hidden_dtype = features.d_weight_dtype = gradient;
    PlanRequest request;
    request.device = make_context(run.kernel, run.threads).device();
    request.memory_budget = run.budget;
    request.kind = run.plan;
    try {
      plan_head({problem.spec.tokens, problem.spec.dim, problem.spec.vocab, problem.spec.dtype},
                features, request);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
};

TEST_P(ChunksTest, SameLossAndHiddenGradientWhateverTheChunk) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    HeadSpec spec = several();
    spec.dtype = dtype;
    if (!accepts(GetParam(), spec)) continue;
    SCOPED_TRACE(name_of(dtype));
    const auto [large, small] = large_and_small(HeadProblem(spec), {});
    if (is_device_kernel(GetParam())) {  // sums have other lengths, and cuBLAS picks other kernels
      EXPECT_LE(relative_error(small.loss.values(), large.loss.values()), 1e-6);
      EXPECT_LE(relative_error(small.lse.values(), large.lse.values()), 1e-6);
      EXPECT_LE(relative_error(small.d_hidden.values(), large.d_hidden.values()),
                dtype == DType::f32 ? 1e-6 : 1e-3);  // some entries round the other way
    } else {
      EXPECT_EQ(large.loss.bytes(), small.loss.bytes());
      EXPECT_EQ(large.lse.bytes(), small.lse.bytes());
      EXPECT_EQ(large.d_hidden.bytes(), small.d_hidden.bytes());
    }
    EXPECT_LE(relative_error(small.d_weight.values(), large.d_weight.values()), 1e-6);
    EXPECT_LE(relative_error(small.d_bias.values(), large.d_bias.values()), 1e-6);
  }
}

// A separate d_weight has the bits of one that is computed with the other gradients. The budget
// does not hold the sums of the full vocabulary.
TEST_P(ChunksTest, SameBitsOfADWeightWithAPassOfItsOwn) {
  if (is_device_kernel(GetParam())) GTEST_SKIP() << "a plan of the CPU";
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int option : {0, 1, 2, 3}) {
      HeadSpec spec = several();
      spec.dtype = dtype;
      spec.vocab = 1390;
      if (option == 1) spec.class_weight = spec.token_weight = true, spec.label_smoothing = 0.1f;
      if (option == 2) spec.per_token = 3, spec.softcap = 20.0f;
      if (option == 3) spec.bias = false, spec.ignored = 2.0;
      if (!accepts(GetParam(), spec)) continue;
      const HeadProblem problem(spec);
      RunSpec run;
      run.kernel = GetParam();
      run.gradient_dtype = dtype;
      run.plan = PlanKind::recompute;
      run.d_hidden = option != 2;  // also without other gradients
      run.d_bias = option != 2;
      run.budget = 1;
      try {
        run_head(problem, run);
        FAIL() << "a budget of one byte was enough";
      } catch (const InvalidArgument& e) {
        const std::string text = e.what();
        run.budget = static_cast<std::size_t>(std::stoull(text.substr(text.rfind('(') + 1)));
      }
      const HeadResult apart = run_head(problem, run);
      EXPECT_GT(apart.plan.weight_vocab, 0);
      EXPECT_LT(apart.plan.weight_vocab, spec.vocab);
      run.budget = std::size_t{1} << 30;
      run.chunk_tokens = apart.plan.chunk_tokens;
      const HeadResult together = run_head(problem, run);
      EXPECT_EQ(together.plan.weight_vocab, 0);
      SCOPED_TRACE(option);
      EXPECT_EQ(apart.loss.bytes(), together.loss.bytes());
      EXPECT_EQ(apart.d_hidden.bytes(), together.d_hidden.bytes());
      EXPECT_EQ(apart.d_weight.bytes(), together.d_weight.bytes());
      EXPECT_EQ(apart.d_bias.bytes(), together.d_bias.bytes());
    }
  }
}

// A 16-bit d_weight is accumulated in more than 16 bits and rounded once: with many chunks it is at
// most one rounding away from the fp32 gradient.
TEST_P(ChunksTest, SixteenBitWeightGradientIsRoundedOnce) {
  for (const auto& [dtype, dim] :
       {std::pair{DType::bf16, 24}, {DType::f16, 24}, {DType::bf16, 264}, {DType::f16, 264}}) {
    // A GPU has another layout of the sums for full tiles of 256 columns. The CPU has blocks of as
    // many, which do not depend on the 16-bit dtype.
    if (dim >= 256 && dtype == DType::f16 && !is_device_kernel(GetParam())) continue;
    HeadSpec spec = several();
    spec.dtype = dtype;
    spec.dim = dim;
    if (!accepts(GetParam(), spec)) continue;
    SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(dim));
    const HeadProblem problem(spec);
    RunSpec run;
    const auto [large, small] = large_and_small(problem, run);
    run.gradient_dtype = dtype;
    const auto [large16, small16] = large_and_small(problem, run);
    const double unit = dtype == DType::bf16 ? std::ldexp(1.0, -8) : std::ldexp(1.0, -11);
    std::int64_t differ = 0;
    for (std::int64_t at = 0; at < spec.vocab * spec.dim; ++at) {
      const double exact = large.d_weight.get(at);
      // Half a ulp, including f16's subnormals, and the error of fp32 sums in another order.
      EXPECT_NEAR(small16.d_weight.get(at), exact, unit * 1.001 * std::abs(exact) + 6e-8);
      differ += small16.d_weight.get(at) != large16.d_weight.get(at);
    }
    EXPECT_LT(differ, spec.vocab * spec.dim / 50) << "more than ties and near ties";
  }
}

TEST_P(ChunksTest, AccumulateAdds) {
  HeadSpec spec = several();
  spec.dtype = DType::bf16;
  if (!accepts(GetParam(), spec)) spec.dtype = DType::f16;
  for (const DType gradient : {DType::f32, spec.dtype}) {
    for (const bool small : {false, true}) {
      for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute, PlanKind::stored}) {
        if (!offers(GetParam(), kind)) continue;
        const HeadProblem problem(spec);
        RunSpec run;
        run.kernel = GetParam();
        run.plan = kind;
        run.gradient_dtype = gradient;
        run.grad_loss = 100.0;  // gradients are of the size of the present values
        if (small && kind == PlanKind::dense) {
          run.budget = std::size_t{1} << 30;
          run.budget = least_budget(problem, run) + 65536;
        }
        SCOPED_TRACE(std::string(name_of(gradient)) + " " + std::string(name_of(kind)));
        const HeadResult fresh = run_head(problem, run);
        const auto value = [](std::int64_t at) {
          return static_cast<double>(at % 7) * 0.25 - 0.75;
        };
        run.change = [&](CrossEntropyOptions& o, auto&, CrossEntropyOutputs& out) {
          o.accumulate = true;
          for (const TensorView& view : {out.d_hidden, out.d_weight, out.d_bias}) {
            for (std::int64_t at = 0; at < view.numel(); ++at) {
              if (view.dtype() == DType::f32) {
                static_cast<float*>(view.data())[at] = static_cast<float>(value(at));
              } else {  // the values are exact in both
                const auto number = static_cast<float>(value(at));
                static_cast<std::uint16_t*>(view.data())[at] =
                    view.dtype() == DType::f16 ? float_to_f16(number) : float_to_bf16(number);
              }
            }
          }
        };
        const HeadResult added = run_head(problem, run);
        const auto compare = [&](const Tensor& sum, const Tensor& part, double unit) {
          for (std::int64_t at = 0; at < sum.numel(); ++at) {
            const double expected = part.get(at) + value(at);
            ASSERT_NEAR(sum.get(at), expected,
                        unit * (std::abs(part.get(at)) + std::abs(expected)) + 1e-6);
          }
        };
        const double unit = gradient == DType::f32 ? 4e-6 : std::ldexp(1.0, -8);
        compare(added.d_hidden, fresh.d_hidden, unit);
        compare(added.d_weight, fresh.d_weight, unit);
        compare(added.d_bias, fresh.d_bias, 1e-5);
      }
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ChunksTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, ChunksTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test

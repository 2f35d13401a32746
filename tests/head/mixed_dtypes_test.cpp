// fp32 hidden states beside a 16-bit weight, and the reverse, against float64: products are those
// of fp32, and gradients have each tensor's dtype. Also linked into the tests of GPU kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "support/far_both.h"
#include "support/far_cases.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

std::vector<HeadSpec> mixed(HeadSpec spec) {
  std::vector<HeadSpec> all;
  for (const DType narrow : {DType::bf16, DType::f16}) {
    all.push_back(spec);
    all.back().hidden_dtype = narrow;
    all.push_back(spec);
    all.back().weight_dtype = narrow;
  }
  return all;
}

std::string name_of(const HeadSpec& spec) {
  return concat(
      spec.hidden_dtype ? "hidden " : "weight ",
      logitless::name_of(spec.hidden_dtype.value_or(spec.weight_dtype.value_or(spec.dtype))));
}

class MixedDtypes : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!accepts(GetParam(), HeadSpec{})) GTEST_SKIP() << "no f32";
  }
  static RunSpec run() {
    RunSpec r;
    r.kernel = GetParam();
    return r;
  }
};

TEST_P(MixedDtypes, AreTheOraclesForEachPlan) {
  HeadSpec spec;
  spec.dim = 37;
  spec.vocab = 300;
  spec.bias = true;
  spec.label_smoothing = 0.1f;
  spec.ignored = 0.2;
  for (const std::int64_t tokens : {3, 150}) {  // 3: a weight of fp32 is read where it is
    spec.tokens = tokens;
    for (const HeadSpec& one : mixed(spec)) {
      const HeadProblem problem(one);
      for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
        if (!offers(GetParam(), kind)) continue;
        for (const std::optional<DType> gradient : {std::optional<DType>(), {DType::bf16}}) {
          SCOPED_TRACE(concat(name_of(one), " ", logitless::name_of(kind), " N=", tokens,
                              gradient ? " own gradients" : ""));
          RunSpec r = run();
          r.plan = kind;
          r.gradient_dtype = gradient;
          expect_matches_oracle(problem, r);
        }
      }
    }
  }
}

// Sums over chunks, and onto what the gradients hold, are fp32 and rounded once.
TEST_P(MixedDtypes, SumsOverChunksAndOntoGradients) {
  HeadSpec spec;
  spec.tokens = 700;
  spec.dim = 16;
  spec.vocab = 260;
  for (const HeadSpec& one : mixed(spec)) {
    SCOPED_TRACE(name_of(one));
    const HeadProblem problem(one);
    RunSpec r = run();
    r.plan = PlanKind::recompute;
    r.chunk_tokens = 256;
    r.gradient_dtype = DType::bf16;
    expect_matches_oracle(problem, r);
    const HeadResult plain = run_head(problem, r);
    r.change = [](CrossEntropyOptions& o, auto&, CrossEntropyOutputs& out) {
      o.accumulate = true;
      for (const TensorView& view : {out.d_hidden, out.d_weight})
        std::memset(view.data(), 0, static_cast<std::size_t>(view.bytes()));
    };
    const HeadResult added = run_head(problem, r);
    EXPECT_EQ(added.d_weight.bytes(), plain.d_weight.bytes());
    EXPECT_EQ(added.d_hidden.bytes(), plain.d_hidden.bytes());
  }
}

TEST_P(MixedDtypes, FarFields) {
  HeadSpec spec;
  spec.tokens = 200;
  spec.dim = 24;
  spec.vocab = 9 * 128 + 37;
  spec.seed = 5;
  if (!std::ranges::count(far_kernels(), GetParam())) GTEST_SKIP() << "no far field";
  for (const HeadSpec& one : mixed(spec)) {
    SCOPED_TRACE(name_of(one));
    const FarProblem backward(one);
    expect_far_field(backward, run(), run_far(backward, run()));
    const FarBothProblem both(one);
    expect_far_both(both, run(), run_far_both(both, run()));
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MixedDtypes);
INSTANTIATE_TEST_SUITE_P(AllKernels, MixedDtypes, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

// On a GPU the workspace holds a chunk of wide hidden states, or a strip of a wide weight: both
// 2048 rows here.
TEST(MixedDtypesPlans, OnAGpu) {
  HeadSpec spec;
  spec.tokens = 2048;
  spec.dim = 64;
  spec.vocab = 8000;
  const auto planned = [](const HeadSpec& one) {
    const HeadProblem problem(one);
    RunSpec forward;
    forward.gradients = false;
    HeadResult result;
    PlanRequest request;
    request.device = {.kind = DeviceKind::cuda, .compute_capability = 90};
    return plan_cross_entropy(problem.options(), problem.inputs(),
                              make_outputs(one, forward, result), request);
  };
  const LossPlan plain = planned(spec);
  for (const HeadSpec& one : mixed(spec)) {
    SCOPED_TRACE(name_of(one));
    const LossPlan plan = planned(one);
    EXPECT_EQ(plan.kernel, "cublas");
    const std::string operands =
        one.hidden_dtype
            ? concat(logitless::name_of(*one.hidden_dtype), " hidden x f32")
            : concat("f32 hidden x ", logitless::name_of(one.weight_dtype.value_or(DType::f32)));
    EXPECT_NE(plan.explain().find(concat("64 (", operands, ")")), std::string::npos)
        << plan.explain();
    EXPECT_EQ(plan.workspace_bytes(), plain.workspace_bytes() + std::size_t{2048} * 64 * 4);
  }
}

TEST(MixedDtypesPlans, RefuseOtherDtypes) {
  const HeadShape shape{64, 32, 1000, DType::f32};
  const auto expect = [&](const HeadShape& of, const HeadFeatures& features, const char* text) {
    try {
      plan_head(of, features);
      ADD_FAILURE() << text;
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), text);
    }
  };
  HeadFeatures features;
  features.d_weight = true;
  features.d_weight_dtype = DType::bf16;
  expect(shape, features, "d_weight_dtype: expected f32, got bf16");
  features.narrow_weight = DType::f16;
  expect(shape, features, "d_weight_dtype: expected f32 or f16, got bf16");
  features.narrow_weight = DType::bf16;
  plan_head(shape, features);
  expect({64, 32, 1000, DType::f16}, features, "narrow_weight: bf16 is beside f32, dtype is f16");
  features.narrow_hidden = DType::f16;
  expect(shape, features,
         "narrow_hidden: expected f32 for none beside narrow_weight bf16, got f16");
  features.narrow_hidden = DType::i32;
  expect(shape, features, "narrow_hidden: expected bf16, f16, or f32 for none, got i32");
}

}  // namespace
}  // namespace logitless::test

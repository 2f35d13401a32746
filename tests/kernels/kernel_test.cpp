// Every kernel that this machine runs, over one table of shapes and options, against float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/checked_ranges.h"
#include "support/mirror.h"
#include "support/problem.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

std::vector<HeadSpec> shape_table() {
  std::vector<HeadSpec> table;
  const std::int64_t shapes[][3] = {{1, 1, 1},     {3, 2, 2},     {2, 3, 127},   {7, 5, 128},
                                    {33, 17, 129}, {24, 8, 255},  {25, 64, 256}, {49, 31, 257},
                                    {3, 300, 50},  {97, 40, 700}, {64, 65, 384}, {130, 96, 1000}};
  for (const auto& s : shapes) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      HeadSpec spec;
      spec.tokens = s[0];
      spec.dim = s[1];
      spec.vocab = s[2];
      spec.dtype = dtype;
      spec.weight_scale = 2.0;
      spec.seed = static_cast<std::uint64_t>(s[0] * 31 + s[1] * 7 + s[2]);
      table.push_back(spec);
    }
  }
  return table;
}

std::vector<HeadSpec> option_table() {
  std::vector<HeadSpec> table;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    HeadSpec base;
    base.tokens = 37;
    base.dim = 24;
    base.vocab = 301;
    base.dtype = dtype;
    base.weight_scale = 3.0;
    const auto with = [&](auto change) {
      HeadSpec spec = base;
      change(spec);
      spec.seed = 100 + table.size();
      table.push_back(spec);
    };
    const std::vector<void (*)(HeadSpec&)> changes = {
        [](HeadSpec& s) { s.bias = true; },
        [](HeadSpec& s) { s.label_smoothing = 0.1f; },
        [](HeadSpec& s) { s.z_loss = 1e-3f; },
        [](HeadSpec& s) { s.softcap = 3.0f; },
        [](HeadSpec& s) { s.logit_scale = 1.7f; },
        [](HeadSpec& s) { s.class_weight = true; },
        [](HeadSpec& s) { s.token_weight = true; },
        [](HeadSpec& s) { s.ignored = 0.4; },
        [](HeadSpec& s) { s.per_token = 5; },
        [](HeadSpec& s) { s.reduction = Reduction::sum; },
        [](HeadSpec& s) { s.reduction = Reduction::none; },
    };
    // Options change what threads compute, not what they share: ThreadSanitizer has each alone.
    const std::size_t apart = kThreadSanitizer ? 1 : changes.size();
    for (std::size_t i = 0; i < changes.size(); ++i) {
      for (std::size_t j = i; j < std::min(i + apart, changes.size()); ++j) {
        with([&](HeadSpec& s) {
          changes[i](s);
          changes[j](s);
        });
      }
    }
  }
  return table;
}

class KernelTest : public testing::TestWithParam<std::string> {};

TEST_P(KernelTest, ShapesForwardAlone) {
  for (const HeadSpec& spec : shape_table()) {
    if (!accepts(GetParam(), spec)) continue;
    SCOPED_TRACE(describe(spec));
    RunSpec run;
    run.kernel = GetParam();
    run.gradients = false;
    expect_matches_oracle(HeadProblem(spec), run);
  }
}

TEST_P(KernelTest, ShapesWithGradientsUnderEveryPlan) {
  for (const HeadSpec& spec : shape_table()) {
    if (GetParam() == "reference" && spec.tokens * spec.dim * spec.vocab > 1000000) continue;
    if (!accepts(GetParam(), spec)) continue;
    const HeadProblem problem(spec);
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute, PlanKind::stored}) {
      if (!offers(GetParam(), kind)) continue;
      SCOPED_TRACE(describe(spec) + " " + std::string(name_of(kind)));
      RunSpec run;
      run.kernel = GetParam();
      run.plan = kind;
      expect_matches_oracle(problem, run);
    }
  }
}

TEST_P(KernelTest, OptionsAndPairsOfOptions) {
  for (HeadSpec spec : option_table()) {
    // A kernel of f16 alone computes the cases of bf16 in f16.
    if (spec.dtype == DType::bf16 && !accepts(GetParam(), spec)) spec.dtype = DType::f16;
    if (!accepts(GetParam(), spec)) continue;
    const HeadProblem problem(spec);
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      if (!offers(GetParam(), kind)) continue;
      if (kind == PlanKind::dense && spec.softcap > 0 && spec.label_smoothing > 0) continue;
      SCOPED_TRACE(describe(spec) + " " + std::string(name_of(kind)));
      RunSpec run;
      run.kernel = GetParam();
      run.plan = kind;
      run.grad_loss = 2.5;
      expect_matches_oracle(problem, run);
    }
  }
}

// A bias decides the probabilities: they are far from those of the products alone.
TEST_P(KernelTest, BiasesThatOutweighTheProducts) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool frequencies : {false, true}) {
      HeadSpec spec;
      spec.tokens = 40;
      spec.dim = 64;
      spec.vocab = GetParam() == "reference" ? 300 : 1500;
      spec.dtype = dtype;
      spec.bias = true;
      if (!accepts(GetParam(), spec)) continue;
      SCOPED_TRACE(describe(spec) + (frequencies ? " frequencies" : " low"));
      HeadProblem problem(spec);
      for (std::int64_t j = 0; j < spec.vocab; ++j)
        problem.bias.set(j, frequencies ? -2.0 * std::log1p(static_cast<double>(j)) : -20.0);
      problem.refresh_oracle();
      RunSpec run;
      run.kernel = GetParam();
      run.grad_loss = 2.5;
      expect_matches_oracle(problem, run);
    }
  }
}

TEST_P(KernelTest, SameBitsForAnyThreadsAndChunks) {
  HeadSpec spec;
  spec.tokens = 201;
  spec.dim = 48;
  spec.vocab = 1500;
  spec.dtype = DType::bf16;
  if (!accepts(GetParam(), spec)) spec.dtype = DType::f16;
  spec.bias = true;
  spec.weight_scale = 3.0;
  if (GetParam() == "reference") spec.tokens = 21;
  const HeadProblem problem(spec);
  for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
    if (!offers(GetParam(), kind)) continue;
    RunSpec run;
    run.kernel = GetParam();
    run.plan = kind;
    run.threads = 1;
    const HeadResult first = run_head(problem, run);
    for (const int threads : {1, 2, 5}) {
      run.threads = threads;
      const HeadResult again = run_head(problem, run);
      EXPECT_EQ(first.loss.bytes(), again.loss.bytes());
      EXPECT_EQ(first.d_hidden.bytes(), again.d_hidden.bytes());
      EXPECT_EQ(first.d_weight.bytes(), again.d_weight.bytes());
      EXPECT_EQ(first.d_bias.bytes(), again.d_bias.bytes());
    }
  }
}

#ifdef __SANITIZE_ADDRESS__
// A range outside its memory is reported as an access of the loop would be.
TEST(CheckedRanges, AreReportedOutsideTheirMemory) {
  const std::vector<float> x(40);
  const auto freed = [] {
    float* memory = new float[4];
    delete[] memory;
    cpu::check_floats(memory, 1, 0, 4);
  };
  cpu::check_floats(x.data(), 4, 10, 10);
  EXPECT_DEATH(cpu::check_floats(x.data(), 4, 10, 11), "heap-buffer-overflow");
  EXPECT_DEATH(cpu::check_floats(x.data() - 1, 1, 0, 4), "heap-buffer-overflow");
  EXPECT_DEATH(freed(), "heap-use-after-free");
  EXPECT_DEATH(cpu::check_floats(nullptr, 1, 0, 1), "null pointer");
  const auto* odd = reinterpret_cast<const char*>(x.data()) + 1;
  EXPECT_DEATH(cpu::check_floats(reinterpret_cast<const float*>(odd), 1, 0, 4), "misaligned");
}
#endif

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KernelTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, KernelTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test

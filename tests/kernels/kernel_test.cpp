// Every kernel this machine runs, over one table of shapes and options, against float64.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/kernels.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

// Bounds of the numbers contract: relative L2 error of gradients and of lse.
double gradient_bound(DType dtype) { return dtype == DType::f32 ? 1e-5 : 4e-3; }
constexpr double kLseBound = 1e-6;

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
    for (std::size_t i = 0; i < changes.size(); ++i) {
      for (std::size_t j = i; j < changes.size(); ++j) {
        with([&](HeadSpec& s) {
          changes[i](s);
          changes[j](s);
        });
      }
    }
  }
  return table;
}

void expect_close(const HeadProblem& problem, const RunSpec& run) {
  const HeadAnswer answer = run_head(problem, run);
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
  EXPECT_LE(relative_error(answer.lse.values(), lse), kLseBound);
  if (problem.spec.reduction == Reduction::none) {
    EXPECT_LE(relative_error(answer.loss.values(), losses), 1e-5);
  } else {
    EXPECT_NEAR(answer.loss.get(0), divisor == 0.0 ? 0.0 : total / divisor,
                2e-6 * (1 + std::abs(total / divisor)));
  }
  if (!run.gradients) return;
  const OracleGradients g = oracle_gradients(p, std::vector<double>(p.tokens, scale));
  const double bound = gradient_bound(problem.spec.dtype);
  EXPECT_LE(relative_error(answer.d_hidden.values(), g.d_hidden), bound) << "d_hidden";
  EXPECT_LE(relative_error(answer.d_weight.values(), g.d_weight), bound) << "d_weight";
  if (problem.spec.bias) {
    EXPECT_LE(relative_error(answer.d_bias.values(), g.d_bias), bound) << "d_bias";
  }
}

// Whether the kernel takes the problem at all; one that declines says why.
bool accepts(const std::string& kernel, const HeadSpec& spec) {
  HeadFeatures features;
  const HeadShape shape{spec.tokens, spec.dim, spec.vocab, spec.dtype};
  return find_head_kernel(kernel).supports(shape, features).empty();
}

class KernelTest : public testing::TestWithParam<std::string> {};

TEST_P(KernelTest, ShapesForwardAlone) {
  for (const HeadSpec& spec : shape_table()) {
    if (!accepts(GetParam(), spec)) continue;
    SCOPED_TRACE(describe(spec));
    RunSpec run;
    run.kernel = GetParam();
    run.gradients = false;
    expect_close(HeadProblem(spec), run);
  }
}

TEST_P(KernelTest, ShapesWithGradientsUnderEveryPlan) {
  for (const HeadSpec& spec : shape_table()) {
    if (GetParam() == "reference" && spec.tokens * spec.dim * spec.vocab > 1000000) continue;
    if (!accepts(GetParam(), spec)) continue;
    const HeadProblem problem(spec);
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute, PlanKind::stored}) {
      if (GetParam() == "reference" && kind != PlanKind::recompute) continue;
      SCOPED_TRACE(describe(spec) + " " + std::string(name_of(kind)));
      RunSpec run;
      run.kernel = GetParam();
      run.plan = kind;
      expect_close(problem, run);
    }
  }
}

TEST_P(KernelTest, OptionsAndPairsOfOptions) {
  for (const HeadSpec& spec : option_table()) {
    if (!accepts(GetParam(), spec)) continue;
    const HeadProblem problem(spec);
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      if (kind == PlanKind::dense &&
          (GetParam() == "reference" || (spec.softcap > 0 && spec.label_smoothing > 0)))
        continue;
      SCOPED_TRACE(describe(spec) + " " + std::string(name_of(kind)));
      RunSpec run;
      run.kernel = GetParam();
      run.plan = kind;
      run.grad_loss = 2.5;
      expect_close(problem, run);
    }
  }
}

TEST_P(KernelTest, SameBitsForAnyThreadsAndChunks) {
  HeadSpec spec;
  spec.tokens = 201;
  spec.dim = 48;
  spec.vocab = 1500;
  spec.dtype = DType::bf16;
  spec.bias = true;
  spec.weight_scale = 3.0;
  if (GetParam() == "reference") spec.tokens = 21;
  const HeadProblem problem(spec);
  for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
    if (GetParam() == "reference" && kind == PlanKind::dense) continue;
    RunSpec run;
    run.kernel = GetParam();
    run.plan = kind;
    run.threads = 1;
    const HeadAnswer first = run_head(problem, run);
    for (const int threads : {1, 2, 5}) {
      run.threads = threads;
      const HeadAnswer again = run_head(problem, run);
      EXPECT_EQ(first.loss.bytes(), again.loss.bytes());
      EXPECT_EQ(first.d_hidden.bytes(), again.d_hidden.bytes());
      EXPECT_EQ(first.d_weight.bytes(), again.d_weight.bytes());
      EXPECT_EQ(first.d_bias.bytes(), again.d_bias.bytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, KernelTest, testing::ValuesIn(kernel_names()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test

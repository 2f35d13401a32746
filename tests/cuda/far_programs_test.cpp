// Heads of compiled programs on a GPU under a FarFieldHead: dense steps bit for bit, far-field
// steps within the error, repeated steps, and refusals.
#include "compiler/far_programs.h"

#include <gtest/gtest.h>

#include "cuda/run_program.h"
#include "kernels/device/order.h"
#include "logitless/error.h"

namespace logitless::test {
namespace {

constexpr FarSizes kSizes = {.tokens = 1024, .vocab_count = 65536, .dim = 128, .dtype = "bf16"};
constexpr double kSpread = 0.02;

class CudaFarPrograms : public testing::TestWithParam<FarCase> {
 protected:
  void SetUp() override {
    const std::optional<DeviceLimits> device = gpu();
    if (!device) GTEST_SKIP() << "no GPU";
    if (GetParam().accuracy == Accuracy::far_both && !cuda::moments_unsupported().empty())
      GTEST_SKIP() << cuda::moments_unsupported();
    options_.device = *device;
  }
  CompileOptions options_;
};

Context gpu_context() {
  ContextOptions options;
  options.device = DeviceKind::cuda;
  return Context(options);
}

TEST_P(CudaFarPrograms, AreDenseThenWithinTheError) {
  const FarCase& c = GetParam();
  const CompiledProgram program = compile(Graph::parse(c.text), options_);
  const ir::Tensors inputs = far_inputs(program, kSpread);
  const ir::Tensors dense = execute_on_gpu(program, inputs);
  const Context context = gpu_context();
  FarFieldHead far(context, quick_far_field(c.accuracy));
  const LossPlan plan = program.far_plan(far);
  if (plan.tau == 0.0f) GTEST_SKIP() << plan.explain();
  std::vector<ir::Tensors> steps;
  std::int64_t dense_steps = 0;
  for (int step = 1; step <= 7; ++step) {
    SCOPED_TRACE(step);
    steps.push_back(execute_on_gpu(program, inputs, 1, &far));
    const ir::Tensors& got = steps.back();
    EXPECT_EQ(far.report().steps, step);
    // Step 3 is a trial. A trial that misses the error bound is repeated densely, and tried with a
    // smaller tau.
    if (far.report().dense_steps > dense_steps) {
      dense_steps = far.report().dense_steps;
      EXPECT_TRUE(step < 3 || far.report().repeated_steps > 0) << far.explain();
      EXPECT_TRUE(same_bits(got, dense));
      continue;
    }
    EXPECT_FALSE(same_bits(got, dense));
    for (const auto& [name, wanted] : dense) {
      const bool exact = name == "s" && c.accuracy == Accuracy::far_backward;
      EXPECT_LT(relative_2norm(got.at(name), wanted), exact ? 1e-6 : 0.05) << name;
    }
  }
  EXPECT_TRUE(far.report().far) << far.explain();
  EXPECT_LE(dense_steps, 4);
  EXPECT_GE(far.report().audits, 2);
  EXPECT_LT(far.report().mean_selected, 0.67);

  FarFieldHead again(context, quick_far_field(c.accuracy));
  for (const ir::Tensors& step : steps)
    EXPECT_TRUE(same_bits(execute_on_gpu(program, inputs, 1, &again), step));
}

TEST_P(CudaFarPrograms, MissesAreDoneAgainDensely) {
  const FarCase& c = GetParam();
  const CompiledProgram program = compile(Graph::parse(c.text), options_);
  const ir::Tensors inputs = far_inputs(program, kSpread);
  const ir::Tensors dense = execute_on_gpu(program, inputs);
  const Context context = gpu_context();
  FarFieldOptions o = quick_far_field(c.accuracy);
  o.error = 1e-9;
  FarFieldHead far(context, o);
  if (program.far_plan(far).tau == 0.0f) GTEST_SKIP() << program.far_plan(far).explain();
  for (int step = 1; step <= 5; ++step)
    EXPECT_TRUE(same_bits(execute_on_gpu(program, inputs, 1, &far), dense)) << step;
  EXPECT_GE(far.report().repeated_steps, 1);
  EXPECT_EQ(far.report().dense_steps, 5);
}

INSTANTIATE_TEST_SUITE_P(All, CudaFarPrograms, testing::ValuesIn(far_cases(kSizes)),
                         [](const auto& c) { return c.param.name; });

TEST(CudaFarProgramsRefusals, OtherMachinesAndNoHead) {
  const std::optional<DeviceLimits> device = gpu();
  if (!device) GTEST_SKIP() << "no GPU";
  CompileOptions options;
  options.device = *device;
  const std::string body = std::string(kFarLogits) + kFarLoss;
  const CompiledProgram program =
      compile(Graph::parse(far_graph(body + kFarGrad, "", kSizes)), options);
  const Context cpu;
  FarFieldHead of_cpu(cpu, quick_far_field(Accuracy::far_backward));
  EXPECT_THROW(program.far_plan(of_cpu), InvalidArgument);
  EXPECT_THROW(execute_on_gpu(program, far_inputs(program, kSpread), 1, &of_cpu), InvalidArgument);
  const CompiledProgram losses = compile(Graph::parse(far_graph(body, "", kSizes)), options);
  const Context context = gpu_context();
  FarFieldHead far(context, quick_far_field(Accuracy::far_backward));
  EXPECT_THROW(execute_on_gpu(losses, far_inputs(losses), 1, &far), Unsupported);
  EXPECT_EQ(far.report().steps, 0);
}

}  // namespace
}  // namespace logitless::test

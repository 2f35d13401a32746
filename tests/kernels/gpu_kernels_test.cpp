// LOGITLESS_GPU_KERNELS, in every build: plans for GPUs need none.
#include "kernels/device/gpu_kernels.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "kernels/device/attention.h"
#include "kernels/device/kernel.h"
#include "logitless/compiler.h"
#include "logitless/error.h"
#include "logitless/plan.h"

namespace logitless {
namespace {

constexpr const char* kVariable = "LOGITLESS_GPU_KERNELS";
constexpr HeadShape kShape{.tokens = 4096, .dim = 1024, .vocab = 50257, .dtype = DType::bf16};

// Sets the variable until the end of the scope.
class Listed {
 public:
  explicit Listed(const char* list) {
    if (const char* before = std::getenv(kVariable)) before_ = before;
    setenv(kVariable, list, 1);
  }
  ~Listed() { before_.empty() ? unsetenv(kVariable) : setenv(kVariable, before_.c_str(), 1); }
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;

 private:
  std::string before_;
};

LossPlan plan(const std::string& kernel = {}, HeadShape shape = kShape) {
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  features.d_hidden_dtype = features.d_weight_dtype = shape.dtype;
  PlanRequest request;
  request.device = {.kind = DeviceKind::cuda, .kernel = kernel};
  return plan_head(shape, features, request);
}

template <typename Error, typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(GpuKernels, TheListChoosesInItsOrder) {
  {
    const Listed all("");
    EXPECT_EQ(plan().kernel, "hopper");
  }
  {
    const Listed one("cublas");
    const LossPlan made = plan();
    EXPECT_EQ(made.kernel, "cublas");
    EXPECT_NE(made.explain().find("hopper: is not in LOGITLESS_GPU_KERNELS=cublas"),
              std::string::npos)
        << made.explain();
    EXPECT_EQ(plan("hopper").kernel, "hopper");  // an explicit name wins
  }
  {
    const Listed both("hopper,cublas");
    EXPECT_EQ(plan().kernel, "hopper");
    HeadShape wide = kShape;
    wide.dtype = DType::f32;
    EXPECT_EQ(plan({}, wide).kernel, "cublas");
  }
  const Listed reversed("cublas,hopper");
  EXPECT_EQ(plan().kernel, "cublas");
}

TEST(GpuKernels, AnotherNameIsRefused) {
  std::string names;
  for (const cuda::DeviceKernel& kernel : cuda::device_kernels())
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
  const std::string expected = "' is unknown; expected a comma-separated list of " + names;
  for (const auto& [list, wrong] : {std::pair("abacus", "abacus"),
                                    {"hopper,abacus", "abacus"},
                                    {"cublas,", ""},
                                    {",", ""},
                                    {"hopper, cublas", " cublas"}}) {
    const Listed listed(list);
    const std::string message = std::string(kVariable) + ": '" + wrong + expected;
    EXPECT_EQ(error_of<InvalidArgument>([] { plan(); }), message);
    EXPECT_EQ(error_of<InvalidArgument>([] {
                const Graph graph =
                    Graph::parse("graph g(%x: f32[2, 3]) { %y = exp %x return y: %y }");
                compile(graph, {.device = {.kind = DeviceKind::cuda}});
              }),
              message);
  }
  const Listed twice("cublas,cublas");
  EXPECT_EQ(error_of<InvalidArgument>([] { plan(); }),
            "LOGITLESS_GPU_KERNELS: cublas is named twice in 'cublas,cublas'");
}

TEST(GpuKernels, WithoutAnyThatTakesTheHeadThePlanIsRefused) {
  const Listed listed("hopper");
  HeadShape wide = kShape;
  wide.dtype = DType::f32;
  const std::string message = error_of<Unsupported>([&] { plan({}, wide); });
  EXPECT_NE(message.find("cublas: is not in LOGITLESS_GPU_KERNELS=hopper"), std::string::npos)
      << message;
}

TEST(GpuKernels, TheFarFieldAndShardingFollow) {
  const Listed listed("cublas");
  EXPECT_EQ(error_of<Unsupported>([] { cuda::find_far_kernel(90); }),
            "kernel hopper is not in LOGITLESS_GPU_KERNELS=cublas; kernel sm80 is not in "
            "LOGITLESS_GPU_KERNELS=cublas; kernel sm86 is not in LOGITLESS_GPU_KERNELS=cublas");
  EXPECT_STREQ(cuda::find_far_kernel(90, "hopper").name, "hopper");
  DeviceLimits device{.kind = DeviceKind::cuda};
  EXPECT_FALSE(supports_vocab_parallel(device, DType::bf16, 1024));
  device.kernel = "hopper";
  EXPECT_TRUE(supports_vocab_parallel(device, DType::bf16, 1024));
}

TEST(GpuKernels, InstructionsAreThoseOfTheListedKernels) {
  const auto capability = [](const char* list, int of_gpu) {
    return cuda::instruction_capability(cuda::parse_gpu_kernels("list", list), of_gpu);
  };
  EXPECT_EQ(capability("", 90), 90);
  EXPECT_EQ(capability("cublas,hopper", 90), 90);
  EXPECT_EQ(capability("cublas", 90), 80);
  for (const int other : {80, 86, 89, 100, 120}) EXPECT_EQ(capability("cublas", other), other);
}

// Runs once more under ctest with the variable set.
TEST(GpuKernels, AttentionTakesTheInstructionsOfTheEnvironment) {
  cuda::AttentionCall call;
  call.heads = call.kv_heads = 4;
  call.queries = call.keys = 256;
  call.dim = 64;
  const bool hopper = cuda::instruction_capability(cuda::gpu_kernels(), 90) == 90;
  EXPECT_EQ(cuda::instruction_capability(90), hopper ? 90 : 80);
  const std::size_t bytes = cuda::attention_scratch_bytes(call, true, 90);
  EXPECT_EQ(bytes == cuda::attention_scratch_bytes(call, true, 80), !hopper);
}

}  // namespace
}  // namespace logitless

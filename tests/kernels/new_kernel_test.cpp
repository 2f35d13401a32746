// Plans with the kernel that docs/develop/adding_a_kernel.md adds to the table. Its three files are
// all that differ: this program links the tree's other objects.
#include <gtest/gtest.h>

#include "kernels/device/kernel.h"
#include "logitless/error.h"
#include "logitless/plan.h"

namespace logitless {
namespace {

constexpr HeadShape kShape{.tokens = 5000, .dim = 1024, .vocab = 50257, .dtype = DType::bf16};

LossPlan plan_on(int compute_capability, HeadShape shape = kShape, std::uint64_t budget = 0) {
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  features.d_hidden_dtype = features.d_weight_dtype = shape.dtype;
  PlanRequest request;
  request.device.kind = DeviceKind::cuda;
  request.device.compute_capability = compute_capability;
  request.memory_budget = budget;
  return plan_head(shape, features, request);
}

TEST(NewKernel, IsPlannedOnItsGpus) {
  EXPECT_EQ(plan_on(100).kernel, "sm100");
  EXPECT_EQ(plan_on(103).kernel, "sm100");
  EXPECT_EQ(plan_on(90).kernel, "hopper");
  EXPECT_EQ(plan_on(80).kernel, "sm80");
  EXPECT_EQ(plan_on(120).kernel, "sm86");
  HeadShape wide = kShape;
  wide.dtype = DType::f32;
  const LossPlan plan = plan_on(100, wide);
  EXPECT_EQ(plan.kernel, "cublas");
  EXPECT_NE(plan.explain().find("sm100: multiplies bf16, hidden and weight are f32"),
            std::string::npos)
      << plan.explain();
  EXPECT_NE(
      plan_on(90).explain().find("sm100: runs on compute capability 10.0 to 10.9, the GPU has 9.0"),
      std::string::npos);
}

TEST(NewKernel, HasChunksAndBlocksInItsTiles) {
  const LossPlan plan = plan_on(100, kShape, 40_MiB);
  EXPECT_LE(plan.workspace_bytes(), 40_MiB);
  EXPECT_LT(plan.block_vocab, kShape.vocab);
  EXPECT_EQ(plan.block_vocab % 128, 0);
  EXPECT_TRUE(plan.chunk_tokens == kShape.tokens || plan.chunk_tokens % 128 == 0)
      << plan.chunk_tokens;
}

TEST(NewKernel, TakesWhatItsRowSays) {
  DeviceLimits device{.kind = DeviceKind::cuda, .kernel = "sm100", .compute_capability = 100};
  EXPECT_TRUE(supports_vocab_parallel(device, DType::bf16, 1024));
  EXPECT_FALSE(supports_vocab_parallel(device, DType::bf16, 1020));
  EXPECT_FALSE(supports_vocab_parallel(device, DType::f16, 1024));
  device.compute_capability = 120;
  EXPECT_FALSE(supports_vocab_parallel(device, DType::bf16, 1024));
  device.kernel.clear();
  for (const int capability : {80, 86, 90, 120}) {
    device.compute_capability = capability;
    EXPECT_TRUE(supports_vocab_parallel(device, DType::bf16, 1020));
    EXPECT_TRUE(supports_vocab_parallel(device, DType::f16, 1024));
    EXPECT_FALSE(supports_vocab_parallel(device, DType::f32, 1024));
  }
  EXPECT_STREQ(cuda::find_far_kernel(90).name, "hopper");
  EXPECT_STREQ(cuda::find_far_kernel(100).name, "sm80");
  EXPECT_STREQ(cuda::find_far_kernel(86).name, "sm86");
  EXPECT_THROW(cuda::find_far_kernel(75), Unsupported);
}

TEST(NewKernel, TilesOfEveryKernelDivideThePadding) {
  for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) {
    EXPECT_EQ(cuda::kBlockPadding % kernel.tile_tokens, 0) << kernel.name;
    EXPECT_EQ(cuda::kBlockPadding % kernel.tile_vocab, 0) << kernel.name;
  }
}

}  // namespace
}  // namespace logitless

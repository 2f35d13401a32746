// Plans of a saved head: all tokens in one chunk within reasonable memory, or a refusal with the
// reason.
#include <gtest/gtest.h>

#include <string>

#include "logitless/saved_head.h"
#include "support/refusal.h"

namespace logitless::test {
namespace {

// Llama-3-8B's head with 8192 tokens in bf16: 3.9 GiB of fp32 logits. No tensor has memory.
class SavedPlan : public testing::Test {
 protected:
  void SetUp() override {
    request.device.kind = DeviceKind::cuda;
    request.device.compute_capability = 90;
    try {
      plan();
    } catch (const Unsupported& e) {
      GTEST_SKIP() << "a build without CUDA: " << e.what();
    }
  }
  static TensorView tensor(DType dtype, std::initializer_list<std::int64_t> shape, int at) {
    return TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << (40 + at)), dtype, shape);
  }
  LossPlan plan() const { return plan_head_saved(options, in, out, to, request); }

  static constexpr std::int64_t kTokens = 8192, kDim = 4096, kVocab = 128256;
  HeadOptions options;
  HeadInputs in{tensor(DType::bf16, {kTokens, kDim}, 0), tensor(DType::bf16, {kVocab, kDim}, 1),
                tensor(DType::i64, {kTokens}, 2)};
  HeadOutputs out{tensor(DType::f32, {kTokens}, 3), {}, tensor(DType::f32, {kTokens}, 4)};
  HeadGradients to{tensor(DType::bf16, {kTokens, kDim}, 5), tensor(DType::bf16, {kVocab, kDim}, 6)};
  PlanRequest request;
};

TEST_F(SavedPlan, KeepsAllTokensInThreeTenthsOfTheLogits) {
  const LossPlan made = plan();
  EXPECT_EQ(made.kind, PlanKind::dense);
  EXPECT_GE(made.weight_ranges > 0 ? made.first_tokens : made.chunk_tokens, kTokens);
  EXPECT_EQ(made.passes, 3.0);
  EXPECT_LE(made.workspace_bytes(), made.logits_bytes() * 3 / 10);
  EXPECT_GT(made.weight_ranges, 0) << "d_weight's memory is as large as half of the exponentials";
}

TEST_F(SavedPlan, OutputsTakeLittle) {
  const std::size_t without = plan().workspace_bytes();
  out.entropy = tensor(DType::f32, {kTokens}, 8);
  out.argmax = tensor(DType::i32, {kTokens}, 9);
  EXPECT_LE(plan().workspace_bytes(), without + 64_MiB);
}

// A cotangent of the entropy is not known before the backward.
TEST_F(SavedPlan, ServesAGradientOfTheEntropyUnlessThereIsASoftcap) {
  EXPECT_FALSE(plan().features.entropy_gradient);
  out.entropy = tensor(DType::f32, {kTokens}, 8);
  EXPECT_TRUE(plan().features.entropy_gradient);
  options.softcap = 30.0f;
  EXPECT_FALSE(plan().features.entropy_gradient);
}

TEST_F(SavedPlan, HasNoSmallerChunksForASmallerBudget) {
  request.memory_budget = 100_MiB;
  const std::string said = message_of<InvalidArgument>([&] { plan(); });
  EXPECT_NE(said.find("memory_budget: 100.0 MiB"), std::string::npos) << said;
  EXPECT_NE(said.find("is below the least plan, dense, which needs"), std::string::npos) << said;
}

TEST_F(SavedPlan, TakesNoMoreThanADefaultMay) {
  to.d_weight = {};  // its memory would hold half of them
  EXPECT_THROW(plan(), InvalidArgument);
  request.memory_budget = 3_GiB;
  EXPECT_GT(plan().workspace_bytes(), 2 * kTokens * kVocab);
}

// With 2 GiB of exponentials in the workspace it is less than 1 % faster than with a fifth of them.
TEST_F(SavedPlan, TakesNoMoreOfABudgetThanSpeedIsWorth) {
  const LossPlan free = plan();
  request.memory_budget = 64_GiB;
  const LossPlan made = plan();
  EXPECT_EQ(made.memory_budget, 64_GiB);
  EXPECT_EQ(made.default_limit, made.logits_bytes());
  EXPECT_GE(made.weight_ranges > 0 ? made.first_tokens : made.chunk_tokens, kTokens);
  EXPECT_LT(made.workspace_bytes(), 2 * kTokens * kVocab) << made.explain();
  EXPECT_LE(made.predicted_seconds, 1.01 * free.predicted_seconds);
  request.memory_budget = made.workspace_bytes();
  EXPECT_LE(plan().workspace_bytes(), made.workspace_bytes());
}

TEST_F(SavedPlan, RefusesWhatItCannotKeep) {
  request.kind = PlanKind::recompute;
  EXPECT_THROW(plan(), InvalidArgument);
  request.kind = {};
  request.accuracy = Accuracy::far_backward;
  EXPECT_THROW(plan(), InvalidArgument);
  request.accuracy = Accuracy::exact;
  options.softcap = 30.0f;
  EXPECT_NO_THROW(plan());
  out.weighted_logit_sum = tensor(DType::f32, {kTokens}, 7);
  EXPECT_THROW(plan(), Unsupported);
}

TEST(SavedPlanOnTheCpu, IsRefusedByName) {
  float numbers[64] = {};
  std::int32_t targets[2] = {};
  const HeadInputs in{TensorView(numbers, DType::f32, {2, 4}),
                      TensorView(numbers + 8, DType::f32, {3, 4}),
                      TensorView(targets, DType::i32, {2})};
  const HeadOutputs out{TensorView(numbers + 20, DType::f32, {2})};
  const HeadGradients to{TensorView(numbers + 24, DType::f32, {2, 4}),
                         TensorView(numbers + 32, DType::f32, {3, 4})};
  const Context context;
  const std::string said =
      message_of<Unsupported>([&] { plan_head_saved(context, HeadOptions{}, in, out, to); });
  EXPECT_NE(said.find("on the CPU use head_forward and head_backward"), std::string::npos) << said;
  const LossPlan forward = plan_head_forward(context, HeadOptions{}, in, out);
  const Workspace workspace(context, forward);
  EXPECT_THROW(head_forward_saved(context, forward, HeadOptions{}, in, out, to, workspace),
               Unsupported);
  EXPECT_THROW(head_backward_saved(context, forward, HeadOptions{}, in, {}, to, workspace),
               Unsupported);
}

}  // namespace
}  // namespace logitless::test

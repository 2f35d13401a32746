// Tests training with the far field on a GPU: dense steps have the same bits as without it,
// far-field steps similar losses, and resumed runs the same bits. Skips without a GPU whose kernels
// have it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "logitless/device.h"
#include "train/hash.h"
#include "train/model/gpt.h"
#include "train/run/trainer.h"
#include "train/test_folder.h"
#include "train/training.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kLength = 64;

ModelPtr model() {
  GptConfig config;
  config.vocab = 65536;
  config.context = kLength;
  config.dim = 128;
  config.heads = 2;
  config.layers = 1;
  config.activations = DType::bf16;
  return make_gpt(config);
}

TrainOptions options(Accuracy accuracy) {
  TrainOptions o;
  o.batch = 16;
  o.schedule = {3e-3, 1e-3, 2, 20};
  o.device = DeviceKind::cuda;
  o.far_field = quick_far_field(accuracy);
  return o;
}

Dataset data(std::int64_t windows, std::uint64_t seed) {
  std::vector<std::int32_t> vocab_ids = {0};
  while (std::ssize(vocab_ids) < windows * kLength + 1)
    vocab_ids.push_back(static_cast<std::int32_t>(mix(seed, vocab_ids.size()) % 50 * 77));
  return Dataset::of_tokens(vocab_ids, kLength, 4000);
}

Trainer trainer(const TrainOptions& o) { return Trainer(model(), o, data(200, 1), data(20, 2)); }

class DeviceFarTrainer : public TestFolder, public testing::WithParamInterface<Accuracy> {
 protected:
  void SetUp() override {
    TestFolder::SetUp();
    if (const std::string missing = gpu_missing(); !missing.empty()) GTEST_SKIP() << missing;
    Trainer far = trainer(options(GetParam()));
    if (far.far_field() == nullptr) GTEST_SKIP() << far.far_refusal();
  }
};

TEST_P(DeviceFarTrainer, IsDenseThenFarAndValidatesExactly) {
  TrainOptions o = options(GetParam());
  Trainer far = trainer(o);
  EXPECT_GT(far.memory().far_workspace, 0u);
  o.far_field.reset();
  Trainer dense = trainer(o);
  EXPECT_EQ(losses(far, 4), losses(dense, 4));
  EXPECT_TRUE(same_values(far, dense)) << "dense steps are the same to the bit";
  EXPECT_EQ(far.validate(16), dense.validate(16));
  losses(far, 8);
  losses(dense, 8);
  const FarFieldReport& r = far.far_field()->report();
  EXPECT_EQ(r.steps, 12);
  EXPECT_GE(r.audits, 1);
  EXPECT_LT(r.dense_steps, 12) << far.far_field()->explain();
  EXPECT_LE(r.worst_accepted_error, 0.3);
  EXPECT_FALSE(same_values(far, dense));
  EXPECT_NEAR(far.validate(16), dense.validate(16), 0.05);
}

TEST_P(DeviceFarTrainer, AResumedRunHasTheSameBits) {
  const TrainOptions o = options(GetParam());
  Trainer whole = trainer(o);
  const std::vector<double> expected = losses(whole, 9);
  for (const int half : {4, 7}) {  // before the new order is used, and after
    SCOPED_TRACE(half);
    Trainer first = trainer(o), second = trainer(o);
    std::vector<double> parts = losses(first, half);
    first.save(path("half.safetensors"), "{}");
    second.resume(path("half.safetensors"));
    for (const double loss : losses(second, 9 - half)) parts.push_back(loss);
    EXPECT_EQ(parts, expected);
    EXPECT_TRUE(same_values(whole, second));
    EXPECT_EQ(second.far_field()->report().dense_steps, whole.far_field()->report().dense_steps);
  }
}

INSTANTIATE_TEST_SUITE_P(Accuracies, DeviceFarTrainer,
                         testing::Values(Accuracy::far_backward, Accuracy::far_both),
                         [](const auto& a) { return std::string(name_of(a.param)); });

}  // namespace
}  // namespace logitless::train

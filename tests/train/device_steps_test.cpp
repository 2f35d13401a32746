// Tests that steps on a GPU are asynchronous: only a request for losses waits.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "logitless/error.h"
#include "train/device/steps.h"
#include "train/hash.h"
#include "train/model/gpt.h"
#include "train/training.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kVocab = 300, kLength = 16, kRows = 2;

// Blocks a stream until it is opened, or until a timeout that reveals a caller who waits for the
// stream.
class Gate {
 public:
  explicit Gate(void* stream) {
    using Function = void (*)(void*);
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    const auto launch = reinterpret_cast<int (*)(void*, Function, void*)>(
        driver == nullptr ? nullptr : dlsym(driver, "cuLaunchHostFunc"));
    if (launch == nullptr) throw DeviceError("the driver has no cuLaunchHostFunc");
    const Function wait = [](void* gate) { static_cast<Gate*>(gate)->hold(); };
    if (launch(stream, wait, this) != 0) throw DeviceError("cuLaunchHostFunc failed");
  }
  // Opens the gate. Returns whether the stream was still blocked.
  bool open() {
    const std::lock_guard lock(mutex_);
    const bool held = !gave_up_;
    open_ = true;
    changed_.notify_all();
    return held;
  }

 private:
  void hold() {
    std::unique_lock lock(mutex_);
    gave_up_ = !changed_.wait_for(lock, std::chrono::seconds(20), [&] { return open_; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false, gave_up_ = false;
};

Batch batch_at(std::int64_t first) {
  Batch batch{kRows, kLength, {}, {}, kRows * kLength};
  for (std::int64_t i = 0; i < kRows * kLength; ++i) {
    const auto at = static_cast<std::uint64_t>(first * kLength + i);
    batch.tokens.push_back(static_cast<std::int64_t>(mix(1, at) % kVocab));
    batch.targets.push_back(static_cast<std::int64_t>(mix(1, at + 1) % kVocab));
  }
  return batch;
}

// A small GPT with its steps, always from the same weights.
struct Steps {
  explicit Steps(std::int64_t accumulate) {
    GptConfig config;
    config.vocab = kVocab;
    config.context = kLength;
    config.dim = 32;
    config.heads = 2;
    config.layers = 1;
    config.activations = DType::bf16;
    const ModelPtr model = make_gpt(config);
    const std::vector<Parameter> list = model->parameters();
    DeviceModel device;
    CompileOptions options;
    options.device = context.device();
    device.loss = compile(build_loss(*model, kRows, kLength, Weights::rounded), options);
    device.logits = compile(build_logits(*model, 1, kLength, Weights::rounded), options);
    for (const Parameter& p : list) {
      device.parameters.push_back({p.name, rounded_name(p.name), p.is_matrix()});
      if (accumulate > 1) options.added.push_back("d_" + p.name);
    }
    device.step = compile(build_step(*model, kRows, kLength, Weights::rounded), options);
    device.accumulate = accumulate;
    device.rows = kRows;
    device.read = [this](std::int64_t first) {
      if (first == bad) throw InvalidArgument("a window that cannot be read");
      return batch_at(first);
    };
    device.partition = RankPartition(counts_of(list), device.uses());
    TensorSet values(device.partition.layout());
    for (std::size_t i = 0; i < list.size(); ++i) initialise(list[i], i, 1, values[i]);
    steps.emplace(context, device);
    steps->put(values, {}, {});
  }
  void start(std::int64_t step) {
    steps->start((step - 1) * kRows, 1.0f / (kRows * kLength), step, 0.01);
  }

  Context context{[] {
    ContextOptions options;
    options.device = DeviceKind::cuda;
    return options;
  }()};
  std::int64_t bad = -1;
  std::optional<DeviceSteps> steps;
};

class DeviceStepsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = gpu_missing(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(DeviceStepsTest, AreStartedWithoutWaitingForTheDevice) {
  for (const std::int64_t accumulate : {1, 3}) {
    Steps waited(accumulate), held(accumulate);
    std::vector<double> expected;
    for (std::int64_t step = 1; step <= 2; ++step) {
      waited.start(step);
      expected.push_back(waited.steps->finish().loss);
    }
    // The number of steps for which there are pinned buffers.
    const std::int64_t ahead = accumulate == 1 ? 2 : 1;
    Gate gate(held.steps->stream());
    for (std::int64_t step = 1; step <= ahead; ++step) held.start(step);
    EXPECT_TRUE(gate.open()) << "starting waited for the device";
    for (std::int64_t step = 0; step < ahead; ++step)
      EXPECT_EQ(held.steps->finish().loss, expected[static_cast<std::size_t>(step)]);
  }
}

TEST_F(DeviceStepsTest, SayWhatCannotBeRead) {
  Steps steps(1), good(1);
  steps.bad = kRows;
  steps.start(1);
  EXPECT_THROW(steps.start(2), InvalidArgument);
  EXPECT_THROW(steps.start(2), InvalidArgument) << "and again";
  good.start(1);
  EXPECT_EQ(steps.steps->finish().loss, good.steps->finish().loss) << "the step before it";
  EXPECT_THROW(steps.steps->finish(), InternalError);
}

}  // namespace
}  // namespace logitless::train

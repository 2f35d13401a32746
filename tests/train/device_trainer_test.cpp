// Compares training on a GPU with the CPU, and tests options that must not change a bit. Skips
// without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "logitless/device.h"
#include "logitless/error.h"
#include "train/hash.h"
#include "train/model/gpt.h"
#include "train/model/llama.h"
#include "train/run/trainer.h"
#include "train/step_inputs.h"
#include "train/test_folder.h"
#include "train/training.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kVocab = 600, kLength = 32;
constexpr int kSteps = 20;

ModelPtr small(DType dtype = DType::f32) {
  GptConfig config;
  config.vocab = kVocab;
  config.context = kLength;
  config.dim = 64;
  config.heads = 2;
  config.layers = 2;
  config.activations = dtype;
  return make_gpt(config);
}

// Makes a Llama with grouped queries and rotary positions.
ModelPtr small_llama(DType dtype) {
  LlamaConfig config;
  config.type = "llama";
  config.vocab = kVocab;
  config.context = kLength;
  config.dim = 64;
  config.inner = 128;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_size = 16;
  config.tied_head = true;
  config.activations = dtype;
  return make_llama(config);
}

TrainOptions on(DeviceKind device) {
  TrainOptions o;
  o.batch = 4;
  o.schedule = {3e-3, 1e-3, 2, kSteps};
  o.threads = device == DeviceKind::cpu ? 1 : 0;
  o.device = device;
  return o;
}
const TrainOptions kGpu = on(DeviceKind::cuda), kCpu = on(DeviceKind::cpu);

// Makes data in which a token mostly determines the next one.
Dataset data(std::int64_t windows, std::uint64_t seed) {
  std::vector<std::int32_t> vocab_ids = {0};
  while (std::ssize(vocab_ids) < windows * kLength + 1) {
    const auto i = static_cast<std::uint64_t>(vocab_ids.size());
    vocab_ids.push_back(uniform(seed, i) < 0.8 ? (vocab_ids.back() * 7 + 3) % 50
                                               : static_cast<std::int32_t>(mix(seed, i) % kVocab));
  }
  return Dataset::of_tokens(vocab_ids, kLength, kVocab);
}

Trainer trainer(const TrainOptions& o, const ModelPtr& model = small()) {
  return Trainer(model, o, data(40, 1), data(5, 2));
}

std::vector<float> all_values(const Trainer& t) {
  std::vector<float> all;
  const TensorSet& values = t.values();
  for (std::size_t i = 0; i < values.size(); ++i)
    all.insert(all.end(), values[i].begin(), values[i].end());
  return all;
}

// Returns whether the GPU has as much free memory after `act` as before, in one of several tries:
// other processes may use it.
bool keeps_free_memory(const std::function<void()>& act) {
  ContextOptions here;
  here.device = DeviceKind::cuda;
  const Context context(here);
  for (int i = 0; i < 5; ++i) {
    const std::size_t before = device_status(context).free_bytes;
    act();
    if (device_status(context).free_bytes == before) return true;
  }
  return false;
}

std::vector<Bytes> run_on_gpu(const Context& gpu, const Model& model, const Graph& graph) {
  const CompiledProgram program = compile(graph, {.device = gpu.device(), .chunk = false});
  const DeviceStream stream(gpu);
  std::list<DeviceBuffer> memory;
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const Bytes& input : step_inputs(model, program)) {
    memory.emplace_back(gpu, input.size());
    stream.copy(memory.back().data(), input.data(), input.size());
    stream.wait();
    parameters.push_back(memory.back().data());
  }
  std::vector<Bytes> outputs;
  for (const CompiledProgram::Tensor& t : program.results()) {
    outputs.emplace_back(static_cast<std::size_t>(t.bytes()));
    memory.emplace_back(gpu, outputs.back().size());
    results.push_back(memory.back().data());
  }
  const DeviceBuffer arena(gpu, program.arena_bytes());
  program.prepare(gpu).run(parameters, results, arena.data(), stream.handle());
  for (std::size_t i = 0; i < outputs.size(); ++i)
    stream.copy(outputs[i].data(), results[i], outputs[i].size());
  stream.wait();
  return outputs;
}

class DeviceTrainerTest : public TestFolder {
 protected:
  void SetUp() override {
    if (const std::string reason = gpu_missing(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(DeviceTrainerTest, LosesWhatTheCpuLosesInFloat) {
  Trainer cpu = trainer(kCpu), gpu = trainer(kGpu);
  EXPECT_FALSE(gpu.device_name().empty());
  EXPECT_EQ(all_values(gpu), all_values(cpu)) << "the starting values";
  for (int i = 0; i < kSteps; ++i) {
    const StepResult a = cpu.step(), b = gpu.step();
    EXPECT_NEAR(b.loss, a.loss, 1e-4 * a.loss) << i;
    EXPECT_NEAR(b.norm, a.norm, 1e-3 * a.norm) << i;
    EXPECT_EQ(b.rate, a.rate);
  }
  const double loss = cpu.validate(100);
  EXPECT_NEAR(gpu.validate(100), loss, 1e-4 * loss);
  SampleOptions likeliest;
  likeliest.temperature = 0.0;
  EXPECT_EQ(gpu.generate({3, 24}, 5, likeliest), cpu.generate({3, 24}, 5, likeliest));
}

// Both round to bf16 at the same points, but add in other orders. A step therefore differs by some
// roundings of 2^-9 of single activations, averaged over 128 tokens; the difference grows with
// steps.
TEST_F(DeviceTrainerTest, LosesAboutWhatTheCpuLosesInHalf) {
  Trainer cpu = trainer(kCpu, small(DType::bf16)), gpu = trainer(kGpu, small(DType::bf16));
  const std::vector<double> a = losses(cpu, kSteps), b = losses(gpu, kSteps);
  EXPECT_NEAR(b[0], a[0], 1e-3 * a[0]);
  for (int i = 0; i < kSteps; ++i) EXPECT_NEAR(b[i], a[i], 1e-2 * a[i]) << i;
  EXPECT_LT(b.back(), b.front() - 0.5);
}

// Other orders of addition change no loss of a whole run by a thousandth.
TEST_F(DeviceTrainerTest, LosesWhatTheCpuLosesOver200Steps) {
  constexpr int kRun = 200;
  const auto run = [](TrainOptions o) {
    o.batch = 8;
    o.threads = 0;
    o.schedule = {1e-3, 1e-4, 10, kRun};
    Trainer t(small(DType::bf16), o, data(2000, 1), data(64, 2));
    std::vector<double> found = losses(t, kRun);
    found.push_back(t.validate(64));
    return found;
  };
  const std::vector<double> cpu = run(kCpu), gpu = run(kGpu);
  for (std::size_t i = 0; i < cpu.size(); ++i) EXPECT_NEAR(gpu[i], cpu[i], 1e-3 * cpu[i]) << i;
  EXPECT_LT(cpu.back(), 0.5 * cpu.front()) << "it learns";
}

TEST_F(DeviceTrainerTest, ALlamaLosesWhatTheCpuLoses) {
  for (const auto& [dtype, tolerance] : {std::pair{DType::f32, 1e-4}, {DType::bf16, 1e-2}}) {
    Trainer cpu = trainer(kCpu, small_llama(dtype)), gpu = trainer(kGpu, small_llama(dtype));
    const std::vector<double> a = losses(cpu, kSteps), b = losses(gpu, kSteps);
    for (int i = 0; i < kSteps; ++i) EXPECT_NEAR(b[i], a[i], tolerance * a[i]) << i;
    const double loss = cpu.validate(5);
    EXPECT_NEAR(gpu.validate(5), loss, tolerance * loss);
  }
}

// Returns the relative difference of f32 tensors in the 2-norm.
double relative_2norm(const Bytes& x, const Bytes& y) {
  std::vector<float> a(x.size() / sizeof(float)), b(y.size() / sizeof(float));
  std::memcpy(a.data(), x.data(), x.size());
  std::memcpy(b.data(), y.data(), y.size());
  double squares = 0.0, of = 1e-300;
  for (std::size_t i = 0; i < b.size(); ++i) {
    squares += std::pow(static_cast<double>(a[i]) - b[i], 2);
    of += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(squares / of);
}

TEST_F(DeviceTrainerTest, RoundedWeightsChangeNoBit) {
  ContextOptions here;
  here.device = DeviceKind::cuda;
  const Context gpu(here);
  for (const ModelPtr& model : {small(DType::bf16), small_llama(DType::bf16)}) {
    for (const ProgramPair& pair : program_pairs(*model)) {
      const std::vector<Bytes> expected = run_on_gpu(gpu, *model, pair.masters);
      EXPECT_NE(expected[0], Bytes(expected[0].size())) << "nothing but zeros";
      const std::vector<Bytes> rounded = run_on_gpu(gpu, *model, pair.rounded);
      if (model->type() == "gpt2") {
        EXPECT_TRUE(rounded == expected) << pair.name;
        continue;
      }
      // Loops that were separated by a cast become one group, which adds columns in another order.
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_LT(relative_2norm(rounded[i], expected[i]), 1e-4) << pair.name << " result " << i;
    }
  }
}

TEST_F(DeviceTrainerTest, GivesTheSameBitsAgainAndResumed) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Trainer whole = trainer(kGpu, small(dtype)), again = trainer(kGpu, small(dtype));
    std::vector<double> expected = losses(whole, kSteps);
    EXPECT_EQ(losses(again, kSteps), expected);
    EXPECT_EQ(all_values(again), all_values(whole));

    Trainer first = trainer(kGpu, small(dtype));
    losses(first, 7);
    first.validate(3);
    first.save(path("half.safetensors"), "{}");
    Trainer second = trainer(kGpu, small(dtype));
    losses(second, 2);  // steps that resume() must undo
    second.resume(path("half.safetensors"));
    EXPECT_EQ(second.steps_done(), 7);
    EXPECT_EQ(losses(second, kSteps - 7),
              std::vector<double>(expected.begin() + 7, expected.end()));
    EXPECT_EQ(all_values(second), all_values(whole));
  }
}

TEST_F(DeviceTrainerTest, StepsThatAreNotWaitedForAreTheSame) {
  TrainOptions o = kGpu;
  for (const std::int64_t accumulate : {1, 3}) {
    o.accumulate = accumulate;
    Trainer waited = trainer(o), started = trainer(o);
    const std::vector<double> expected = losses(waited, 6);
    std::vector<double> found;
    for (int i = 0; i < 6; ++i) {
      const std::optional<StepResult> before = started.start_step();
      EXPECT_EQ(before.has_value(), i > 0);
      if (before) found.push_back(before->loss);
    }
    EXPECT_EQ(started.steps_done(), 6);
    found.push_back(started.finish_step().value().loss);
    EXPECT_FALSE(started.finish_step().has_value());
    EXPECT_EQ(found, expected);
    EXPECT_EQ(all_values(started), all_values(waited));
  }
}

TEST_F(DeviceTrainerTest, CheckpointsGoOnOnTheOtherDevice) {
  Trainer gpu = trainer(kGpu), cpu = trainer(kCpu), back = trainer(kGpu);
  losses(gpu, 4);
  gpu.save(path("run.safetensors"), "{}");
  cpu.resume(path("run.safetensors"));
  EXPECT_EQ(all_values(cpu), all_values(gpu));
  const double next = cpu.step().loss;
  EXPECT_NEAR(gpu.step().loss, next, 1e-4 * next);
  cpu.export_weights(path("model.safetensors"), {});
  back.import_weights(path("model.safetensors"));
  EXPECT_EQ(all_values(back), all_values(cpu));
  const double loss = cpu.validate(5);
  EXPECT_NEAR(back.validate(5), loss, 1e-4 * loss);
}

TEST_F(DeviceTrainerTest, MicroBatchesMakeTheLargerBatch) {
  TrainOptions large = kGpu;
  large.batch = 12;
  Trainer whole = trainer(large);
  const std::vector<double> expected = losses(whole, 5);
  for (const std::int64_t accumulate : {2, 3, 12}) {
    TrainOptions o = kGpu;
    o.accumulate = accumulate;
    o.batch = 12 / accumulate;
    Trainer parts = trainer(o);
    const std::vector<double> found = losses(parts, 5);
    for (int i = 0; i < 5; ++i)
      EXPECT_NEAR(found[i], expected[i], 2e-5 * expected[i]) << accumulate;
  }
}

TEST_F(DeviceTrainerTest, ARunThatDivergesKeepsTheLastGoodWeights) {
  for (const bool ahead : {false, true}) {
    // Trains until this rate produces values that are not finite.
    TrainOptions o = kGpu;
    o.schedule = {1e20, 1e20, 0, 1000};
    o.clip = 0.0;
    Trainer t = trainer(o), good = trainer(o);
    int done = 0;
    std::string text;
    for (int i = 0; i < 50 && text.empty(); ++i) {
      try {
        if (ahead) {
          if (t.start_step()) ++done;
        } else {
          t.step();
          ++done;
        }
      } catch (const Diverged& error) {
        text = error.what();
      }
    }
    ASSERT_NE(text.find("of step " + std::to_string(done + 1) + " is "), std::string::npos) << text;
    EXPECT_EQ(t.steps_done(), done);
    losses(good, done);
    EXPECT_EQ(all_values(t), all_values(good));
    // Repeating the step throws the same error.
    try {
      t.step();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Diverged& error) {
      EXPECT_EQ(error.what(), text);
    }
    EXPECT_EQ(all_values(t), all_values(good));
  }
}

TEST_F(DeviceTrainerTest, TakesNoMemoryWhileItRuns) {
  TrainOptions o = kGpu;
  o.accumulate = 3;
  Trainer t = trainer(o);
  const TrainMemory before = t.memory();
  EXPECT_GT(total_bytes(before.device), before.arena + 3 * before.parameters);
  EXPECT_GT(before.device_taken, before.device_taken_before);
  EXPECT_TRUE(keeps_free_memory([&] {
    losses(t, 3);
    t.validate(5);
    t.generate({1}, 3, {});
  }));
}

TEST_F(DeviceTrainerTest, SaysWhatDoesNotFitBeforeItTakesAny) {
  TrainOptions o = kGpu;
  o.batch = std::int64_t{1} << 21;  // hidden states of 16 GiB, in dozens of tensors
  o.chunk = false;
  EXPECT_TRUE(keeps_free_memory([&] {
    try {
      trainer(o);
      ADD_FAILURE() << "it fits";
    } catch (const DeviceError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("training takes "), std::string::npos) << text;
      EXPECT_NE(text.find(" are free: a --budget of "), std::string::npos) << text;
    }
  }));
}

}  // namespace
}  // namespace logitless::train

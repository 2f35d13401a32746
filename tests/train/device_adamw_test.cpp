// Compares a GPU's optimiser with the CPU's, and tests streams, events and graphs. Skips without a
// GPU.
#include "logitless/device_adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <list>
#include <optional>
#include <vector>

#include "logitless/device.h"
#include "logitless/error.h"
#include "train/hash.h"
#include "train/optimizer/adamw.h"
#include "train/step_inputs.h"

namespace logitless::train {
namespace {

using Floats = std::vector<float>;

Floats noise(std::size_t size, std::uint64_t seed, double scale = 1.0) {
  Floats values(size);
  for (std::size_t i = 0; i < size; ++i)
    values[i] = static_cast<float>(scale * normal(mix(seed, 7), i));
  return values;
}

// The device buffers and the optimiser of tensors of given sizes.
class Optimizer {
 public:
  // Tensors begin `shift` elements after the start of their allocations.
  Optimizer(const Context& context, const DeviceAdamWOptions& options,
            const std::vector<std::size_t>& sizes, std::size_t shift = 0)
      : context_(context),
        stream_(context),
        rates_(context, sizeof(DeviceAdamWRates)),
        report_(context, sizeof(DeviceAdamWReport)),
        loss_(context, sizeof(float)) {
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      DeviceAdamWTensor tensor;
      const auto block = [&] {
        memory_.emplace_back(context, (sizes[t] + shift + 4) * sizeof(float));
        stream_.fill(memory_.back().data(), 0, memory_.back().bytes());
        return memory_.back().as<float>() + shift;
      };
      tensor.value = block();
      tensor.gradient = block();
      tensor.m = block();
      tensor.v = block();
      if (t % 3 != 2) tensor.rounded = block();
      tensor.count = static_cast<std::int64_t>(sizes[t]);
      tensor.decay = t % 2 == 0;
      tensors.push_back(tensor);
    }
    adamw.emplace(context, options, tensors);
  }

  void put(const float* to, const Floats& from) {
    stream_.copy(const_cast<float*>(to), from.data(), from.size() * sizeof(float));
    stream_.wait();
  }
  Floats get(const float* from, std::size_t count) {
    Floats values(count);
    stream_.copy(values.data(), from, count * sizeof(float));
    stream_.wait();
    return values;
  }
  void loss(float value, bool first) {
    stream_.copy(loss_.data(), &value, sizeof(value));
    stream_.wait();
    if (first)
      adamw->first_loss(loss_.as<float>(), stream_.handle());
    else
      adamw->add_loss(loss_.as<float>(), stream_.handle());
    stream_.wait();
  }
  // Returns whether all existing bf16 copies equal their rounded values.
  bool keeps_rounded() {
    bool all = true;
    for (const DeviceAdamWTensor& t : tensors) {
      if (t.rounded == nullptr) continue;
      const auto count = static_cast<std::size_t>(t.count);
      const Floats values = get(t.value, count);
      std::vector<std::uint16_t> rounded(count);
      stream_.copy(rounded.data(), t.rounded, count * sizeof(std::uint16_t));
      stream_.wait();
      for (std::size_t i = 0; i < count; ++i) all = all && rounded[i] == nearest_bf16(values[i]);
    }
    return all;
  }
  void round() { adamw->round(stream_.handle()); }
  DeviceAdamWReport step(std::int64_t index, double rate) {
    const DeviceAdamWRates rates = adamw->rates(index, rate);
    stream_.copy(rates_.data(), &rates, sizeof(rates));
    adamw->step(rates_.as<DeviceAdamWRates>(), report_.as<DeviceAdamWReport>(), stream_.handle());
    DeviceAdamWReport report;
    stream_.copy(&report, report_.data(), sizeof(report));
    stream_.wait();
    return report;
  }
  void reset() { adamw->reset(stream_.handle()); }

  std::vector<DeviceAdamWTensor> tensors;
  std::optional<DeviceAdamW> adamw;

 private:
  const Context& context_;
  DeviceStream stream_;
  DeviceBuffer rates_, report_, loss_;
  std::list<DeviceBuffer> memory_;
};

class DeviceAdamWTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = gpu_missing(); !reason.empty()) GTEST_SKIP() << reason;
    ContextOptions options;
    options.device = DeviceKind::cuda;
    context_.emplace(options);
  }
  std::optional<Context> context_;
};

const std::vector<std::size_t> kSizes = {40000, 7, 0, 8192, 8193, 3, 16390, 1};

// Compares a step of both from the same state. sizes: running sums of the absolute terms of m.
void expect_same_step(Optimizer& device, const AdamWOptions& options, double clip,
                      std::vector<Floats>& values, std::vector<Floats>& ms, std::vector<Floats>& vs,
                      std::vector<Floats>& sizes, const std::vector<Floats>& gradients,
                      std::int64_t step) {
  std::vector<AdamWSlot> slots;
  std::vector<std::span<const float>> spans;
  for (std::size_t t = 0; t < kSizes.size(); ++t) {
    slots.push_back({values[t], gradients[t], ms[t], vs[t], t % 2 == 0});
    spans.emplace_back(gradients[t]);
    device.put(device.tensors[t].gradient, gradients[t]);
  }
  const double rate = 0.01 / static_cast<double>(step);
  const double norm = global_norm(spans, 1);
  const double scale = clip_scale(norm, clip);
  adamw_step(options, slots, step, rate, scale, 1);
  device.loss(2.5f, true);
  const DeviceAdamWReport report = device.step(step, rate);
  EXPECT_EQ(report.loss, 2.5);
  EXPECT_EQ(report.skipped, 0);
  EXPECT_NEAR(report.norm, norm, 1e-13 * norm);
  for (std::size_t t = 0; t < kSizes.size(); ++t) {
    const Floats value = device.get(device.tensors[t].value, kSizes[t]);
    const Floats m = device.get(device.tensors[t].m, kSizes[t]);
    const Floats v = device.get(device.tensors[t].v, kSizes[t]);
    for (std::size_t i = 0; i < kSizes[t]; ++i) {
      // The tolerance is a few roundings of f32, in all terms of m, which may cancel, and in the
      // step.
      sizes[t][i] =
          0.9f * sizes[t][i] + 0.1f * static_cast<float>(scale * std::abs(gradients[t][i]));
      ASSERT_NEAR(m[i], ms[t][i], 6e-7 * sizes[t][i]);
      ASSERT_NEAR(v[i], vs[t][i], 4e-7 * vs[t][i]);
      ASSERT_NEAR(value[i], values[t][i], 4e-7 * (std::abs(values[t][i]) + 10 * rate))
          << t << " " << i << " step " << step;
    }
  }
  EXPECT_TRUE(device.keeps_rounded()) << step;
}

TEST_F(DeviceAdamWTest, GivesTheCpusNumbers) {
  const AdamWOptions options{0.9, 0.98, 1e-6, 0.2};
  for (const double clip : {0.0, 1.0, 1e9}) {
    SCOPED_TRACE(clip);
    Optimizer device(*context_, {0.9, 0.98, 1e-6, 0.2, clip}, kSizes);
    std::vector<Floats> values, ms, vs, sizes;
    for (std::size_t t = 0; t < kSizes.size(); ++t) {
      values.push_back(noise(kSizes[t], t));
      ms.emplace_back(kSizes[t]);
      vs.emplace_back(kSizes[t]);
      sizes.emplace_back(kSizes[t]);
      device.put(device.tensors[t].value, values[t]);
    }
    EXPECT_FALSE(device.keeps_rounded()) << "before they were rounded";
    device.round();
    EXPECT_TRUE(device.keeps_rounded());
    for (std::int64_t step = 1; step <= 4; ++step) {
      std::vector<Floats> gradients;
      for (std::size_t t = 0; t < kSizes.size(); ++t)
        gradients.push_back(noise(kSizes[t], 100 * static_cast<std::uint64_t>(step) + t, 0.3));
      expect_same_step(device, options, clip, values, ms, vs, sizes, gradients, step);
    }
  }
}

TEST_F(DeviceAdamWTest, AddsTheLossesOfMicroBatches) {
  Optimizer device(*context_, {.clip = 0.0}, kSizes, 4);
  double squares = 0.0;
  for (std::size_t t = 0; t < kSizes.size(); ++t) {
    const Floats gradient = noise(kSizes[t], t);
    device.put(device.tensors[t].gradient, gradient);
    for (const float g : gradient) squares += static_cast<double>(g) * static_cast<double>(g);
  }
  device.loss(1.25f, true);
  device.loss(0.5f, false);
  device.loss(0.5f, false);
  const DeviceAdamWReport report = device.step(1, 0.1);
  EXPECT_EQ(report.loss, 2.25);
  EXPECT_NEAR(report.norm, std::sqrt(squares), 1e-12 * std::sqrt(squares));
}

TEST_F(DeviceAdamWTest, GivesTheSameNormEveryTime) {
  Optimizer device(*context_, {}, {5'000'003});
  device.put(device.tensors[0].gradient, noise(5'000'003, 3));
  device.loss(0.0f, true);
  const double norm = device.step(1, 0.0).norm;
  for (int i = 0; i < 20; ++i) ASSERT_EQ(device.step(1, 0.0).norm, norm);
}

TEST_F(DeviceAdamWTest, ChangesNothingFromAStepThatIsNoNumberOn) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const bool in_loss : {true, false}) {
    for (const float bad : {kNan, kInfinity}) {
      Optimizer device(*context_, {}, kSizes);
      const auto state = [&] {
        std::vector<Floats> all;
        for (const DeviceAdamWTensor& t : device.tensors) {
          for (const float* from : {static_cast<const float*>(t.value),
                                    static_cast<const float*>(t.m), static_cast<const float*>(t.v)})
            all.push_back(device.get(from, static_cast<std::size_t>(t.count)));
        }
        return all;
      };
      for (std::size_t t = 0; t < kSizes.size(); ++t) {
        device.put(device.tensors[t].value, noise(kSizes[t], t));
        device.put(device.tensors[t].gradient, noise(kSizes[t], 10 + t));
      }
      device.loss(1.0f, true);
      EXPECT_EQ(device.step(1, 0.1).skipped, 0);
      const std::vector<Floats> good = state();

      Floats gradient = noise(kSizes[4], 9);
      if (!in_loss) gradient.back() = bad;
      device.put(device.tensors[4].gradient, gradient);
      device.loss(in_loss ? bad : 1.0f, true);
      EXPECT_EQ(device.step(2, 0.1).skipped, 1);
      EXPECT_EQ(state(), good);
      EXPECT_EQ(device.keeps_rounded(), true) << "no copy of what was not written";
      // A step with finite gradients follows.
      device.put(device.tensors[4].gradient, noise(kSizes[4], 9));
      device.loss(1.0f, true);
      const DeviceAdamWReport after = device.step(3, 0.1);
      EXPECT_EQ(after.skipped, 1);
      EXPECT_TRUE(std::isfinite(after.norm));
      EXPECT_EQ(state(), good);
      device.reset();
      device.loss(1.0f, true);
      EXPECT_EQ(device.step(2, 0.1).skipped, 0);
      EXPECT_NE(state(), good);
    }
  }
}

TEST_F(DeviceAdamWTest, AGraphReadsWhatIsThereWhenItIsLaunched) {
  const DeviceStream stream(*context_);
  const DeviceBuffer a(*context_, 64), b(*context_, 64);
  const PinnedBuffer in(*context_, 64), out(*context_, 64);
  DeviceEvent event(*context_);
  event.wait();
  const DeviceGraph graph = stream.capture([&] {
    stream.copy(b.data(), a.data(), 64);
    stream.copy(out.data(), b.data(), 64);
  });
  for (int value : {3, 5}) {
    std::memset(in.data(), value, 64);
    std::memset(out.data(), 0, 64);
    stream.copy(a.data(), in.data(), 64);
    stream.launch(graph);
    stream.record(event);
    event.wait();
    EXPECT_EQ(std::memcmp(in.data(), out.data(), 64), 0) << value;
  }
  EXPECT_THROW(stream.capture([] { throw InvalidArgument("from inside"); }), InvalidArgument);
  stream.launch(graph);
  stream.wait();
  EXPECT_THROW(stream.launch(DeviceGraph()), InvalidArgument);
}

TEST_F(DeviceAdamWTest, ItsMemoryIsWhatItSays) {
  const std::size_t before = context_->memory().current_bytes();
  const std::int64_t counts[] = {100, 9000};
  const DeviceBuffer memory(*context_, 9000 * sizeof(float));
  const std::size_t with_memory = context_->memory().current_bytes();
  EXPECT_EQ(with_memory - before, memory.bytes());
  std::vector<DeviceAdamWTensor> tensors;
  for (const std::int64_t count : counts) {
    float* const at = memory.as<float>();
    tensors.push_back({.value = at, .gradient = at, .m = at, .v = at, .count = count});
  }
  const DeviceAdamW adamw(*context_, {}, tensors);
  EXPECT_EQ(context_->memory().current_bytes() - with_memory, DeviceAdamW::bytes(counts));
  const DeviceStatus status = device_status(*context_);
  EXPECT_FALSE(status.name.empty());
  EXPECT_LT(status.free_bytes, status.total_bytes);
}

}  // namespace
}  // namespace logitless::train

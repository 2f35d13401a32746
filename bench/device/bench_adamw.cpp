// Times AdamW on the tensors of a GPT-2 124M on a GPU: milliseconds and bandwidth of a step, and of
// adding a micro-batch's gradients. Prints a line of JSON.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/device/head.h"
#include "logitless/device.h"
#include "logitless/device_adamw.h"

namespace logitless::bench {
namespace {

std::vector<std::int64_t> gpt2_counts() {
  constexpr std::int64_t kDim = 768, kVocab = 50257, kContext = 1024, kLayers = 12;
  std::vector<std::int64_t> counts = {kVocab * kDim, kContext * kDim};
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    for (const std::int64_t out : {3 * kDim, kDim, 4 * kDim, 4 * kDim})
      counts.insert(counts.end(), {out * kDim, out});
    counts.insert(counts.end(), 4, kDim);
  }
  counts.insert(counts.end(), 2, kDim);
  return counts;
}

// Returns the median of 20 rounds of 5 calls, after as many for warm-up.
double milliseconds(const std::function<void()>& call) {
  constexpr int kRounds = 20, kCalls = 5;
  cuda::Timer timer;
  std::vector<float> times;
  for (int round = -kRounds; round < kRounds; ++round) {
    timer.start(nullptr);
    for (int i = 0; i < kCalls; ++i) call();
    const float taken = timer.stop(nullptr) / kCalls;
    if (round >= 0) times.push_back(taken);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return static_cast<double>(times[kRounds / 2]);
}

void run() {
  ContextOptions options;
  options.device = DeviceKind::cuda;
  const Context context(options);
  const std::vector<std::int64_t> counts = gpt2_counts();
  std::size_t total = 0;
  std::vector<std::size_t> offsets;
  for (const std::int64_t count : counts) {
    offsets.push_back(total);
    total += (static_cast<std::size_t>(count) + 63) / 64 * 64;
  }
  const DeviceBuffer memory(context, 6 * total * sizeof(float));
  const DeviceBuffer small(context, 1024);
  const DeviceStream stream(context);
  stream.fill(memory.data(), 0, memory.bytes());
  stream.fill(small.data(), 0, small.bytes());
  stream.wait();
  std::vector<DeviceAdamWTensor> tensors;
  for (std::size_t t = 0; t < counts.size(); ++t) {
    float* const at = memory.as<float>() + offsets[t];
    tensors.push_back({.value = at,
                       .gradient = at + total,
                       .m = at + 2 * total,
                       .v = at + 3 * total,
                       .rounded = memory.as<std::uint16_t>(4 * total * sizeof(float)) + offsets[t],
                       .count = counts[t],
                       .decay = true});
  }
  const DeviceAdamW adamw(context, {.clip = 1.0}, tensors);
  const double step = milliseconds(
      [&] { adamw.step(small.as<DeviceAdamWRates>(), small.as<DeviceAdamWReport>(256), nullptr); });
  // The norm reads gradients. The step reads four tensors and writes three, and a bf16 copy.
  const double bytes = 8.5 * static_cast<double>(total * sizeof(float));
  const nlohmann::ordered_json line = {{"device", device_status(context).name},
                                       {"parameters", total},
                                       {"tensors", counts.size()},
                                       {"step_ms", step},
                                       {"step_tb_per_s", bytes / step / 1e9}};
  std::printf("%s\n", line.dump().c_str());
}

}  // namespace
}  // namespace logitless::bench

int main() {
  if (const std::string missing = logitless::gpu_missing(); !missing.empty()) {
    std::printf("bench_adamw: skipped: %s\n", missing.c_str());
    return 0;
  }
  logitless::bench::run();
  return 0;
}

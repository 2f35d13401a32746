// Memory, streams and optimizer of a GPU: their errors without a GPU, and their results with one.
#include "logitless/device.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "logitless/device_adamw.h"
#include "logitless/error.h"

namespace logitless {
namespace {

TEST(DeviceTest, ContextsOfTheCpuHaveNoDeviceMemory) {
  const Context cpu;
  EXPECT_THROW(DeviceBuffer(cpu, 16), InvalidArgument);
  EXPECT_THROW(PinnedBuffer(cpu, 16), InvalidArgument);
  EXPECT_THROW(DeviceStream{cpu}, InvalidArgument);
  EXPECT_THROW(DeviceEvent{cpu}, InvalidArgument);
  EXPECT_THROW(cpu.on(nullptr), InvalidArgument);
  EXPECT_THROW(device_status(cpu), InvalidArgument);
  EXPECT_THROW(DeviceAdamW(cpu, {}, {}), InvalidArgument);
}

TEST(DeviceTest, AContextSaysWhatIsMissing) {
  constexpr int kNoSuchDevice = 1000;
  const std::string reason = gpu_missing(kNoSuchDevice);
  ASSERT_FALSE(reason.empty());
  ContextOptions options;
  options.device = DeviceKind::cuda;
  options.device_index = kNoSuchDevice;
  try {
    const Context context(options);
    FAIL() << "a context of a device that is not there";
  } catch (const Unsupported& error) {
    EXPECT_EQ(error.what(), "device: " + reason);
  }
}

TEST(DeviceTest, AdamWsTablesGrowWithBlocks) {
  const auto bytes = [](std::vector<std::int64_t> counts) { return DeviceAdamW::bytes(counts); };
  EXPECT_GT(bytes({1}), 0U);
  EXPECT_EQ(bytes({1}), bytes({8192}));
  // The workspace has 16 bytes for a block and 8 for a sum, for each 8192 elements.
  EXPECT_EQ(bytes({8192 * 1024}) - bytes({8192 * 512}), 512U * 24U);
  EXPECT_GE(bytes(std::vector<std::int64_t>(100, 3)), 100U * (56U + 24U));
}

TEST(AdamWOnADevice, RefusesWhatItCannotRead) {
  const Context cpu;
  alignas(16) float memory[8] = {};
  const auto expect = [&](const DeviceAdamWTensor& a, const DeviceAdamWTensor& b,
                          const std::string& text) {
    const DeviceAdamWTensor both[] = {a, b};
    try {
      DeviceAdamW(cpu, {}, both);
      FAIL() << "expected: " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.what(), text);
    }
  };
  const DeviceAdamWTensor good{
      .value = memory, .gradient = memory, .m = memory, .v = memory, .count = 4};
  DeviceAdamWTensor bad = good;
  bad.v = nullptr;
  expect(good, bad, "tensor 1: v: null");
  bad = good;
  bad.m = memory + 1;
  expect(bad, good, "tensor 0: m: expected memory aligned to 16 bytes");
  bad = good;
  bad.rounded = memory + 1;
  expect(good, bad, "tensor 1: rounded: expected memory aligned to 16 bytes");
  bad = good;
  bad.count = -1;
  expect(good, bad, "tensor 1: count: expected at least 0, got -1");
}

}  // namespace
}  // namespace logitless

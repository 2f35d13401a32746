#include "logitless/memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "logitless/error.h"

namespace logitless {
namespace {

std::uintptr_t address(const Buffer& buffer) {
  return reinterpret_cast<std::uintptr_t>(buffer.data());
}

TEST(MemoryMeter, KeepsThePeak) {
  MemoryMeter meter;
  meter.add(100);
  meter.add(50);
  meter.remove(120);
  meter.add(10);
  EXPECT_EQ(meter.current_bytes(), 40u);
  EXPECT_EQ(meter.peak_bytes(), 150u);
  meter.reset_peak();
  EXPECT_EQ(meter.peak_bytes(), 40u);
  meter.add(1);
  EXPECT_EQ(meter.peak_bytes(), 41u);
}

TEST(MemoryMeter, CountsFromManyThreads) {
  MemoryMeter meter;
  constexpr int kThreads = 4;
  constexpr int kRounds = 20000;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < kRounds; ++i) {
          meter.add(3);
          meter.remove(2);
        }
      });
    }
  }
  EXPECT_EQ(meter.current_bytes(), std::size_t{kThreads} * kRounds);
  EXPECT_GE(meter.peak_bytes(), meter.current_bytes());
  EXPECT_LE(meter.peak_bytes(), meter.current_bytes() + 2 * kThreads);
}

TEST(Buffer, IsAlignedAndWritable) {
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{63}, std::size_t{4097}, std::size_t{3} << 20}) {
    const Buffer buffer(bytes);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(address(buffer) % (bytes >= std::size_t{2} << 20 ? std::size_t{2} << 20 : 64), 0u)
        << bytes;
    std::memset(buffer.data(), 0x5a, bytes);
    EXPECT_EQ(buffer.as<unsigned char>()[bytes - 1], 0x5a);
  }
}

TEST(Buffer, EmptyHoldsNothing) {
  MemoryMeter meter;
  const Buffer none;
  const Buffer zero(0, &meter);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(zero.data(), nullptr);
  EXPECT_EQ(zero.bytes(), 0u);
  EXPECT_EQ(meter.peak_bytes(), 0u);
}

TEST(Buffer, CountsItsBytesOnceUntilItDies) {
  MemoryMeter meter;
  {
    const Buffer first(1000, &meter);
    const Buffer second(24, &meter);
    EXPECT_EQ(meter.current_bytes(), 1024u);
  }
  EXPECT_EQ(meter.current_bytes(), 0u);
  EXPECT_EQ(meter.peak_bytes(), 1024u);
}

TEST(Buffer, MoveTakesMemoryAndMeter) {
  MemoryMeter meter;
  {
    Buffer source(100, &meter);
    source.as<char>()[99] = 'x';
    const void* data = source.data();
    Buffer target(std::move(source));
    EXPECT_EQ(source.data(), nullptr);  // NOLINT: moved-from is empty by contract
    EXPECT_EQ(source.bytes(), 0u);
    EXPECT_EQ(target.data(), data);
    EXPECT_EQ(target.as<char>()[99], 'x');
    EXPECT_EQ(meter.current_bytes(), 100u);
  }
  EXPECT_EQ(meter.current_bytes(), 0u);
}

TEST(Buffer, MoveAssignmentReleasesTheOldMemory) {
  MemoryMeter meter;
  MemoryMeter other_meter;
  Buffer target(100, &meter);
  target = Buffer(30, &other_meter);
  EXPECT_EQ(meter.current_bytes(), 0u);
  EXPECT_EQ(other_meter.current_bytes(), 30u);
  EXPECT_EQ(target.bytes(), 30u);
  target = Buffer();
  EXPECT_EQ(other_meter.current_bytes(), 0u);
  EXPECT_EQ(target.data(), nullptr);
}

TEST(Buffer, ShortMemoryThrowsAndCountsNothing) {
  MemoryMeter meter;
  EXPECT_THROW(Buffer(SIZE_MAX, &meter), DeviceError);
  EXPECT_THROW(Buffer(SIZE_MAX / 2, &meter), DeviceError);
  EXPECT_EQ(meter.current_bytes(), 0u);
  EXPECT_EQ(meter.peak_bytes(), 0u);
}

TEST(ProcessPeak, CoversMemoryThatWasTouched) {
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  const Buffer buffer(kBytes);
  std::memset(buffer.data(), 1, kBytes);
  EXPECT_GE(process_peak_bytes(), kBytes);
}

}  // namespace
}  // namespace logitless

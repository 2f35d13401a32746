// A sum stored in 24 bits: the upper 16 of its fp32 bits, which are a bf16, and the next 8. The
// last 8 bits are dropped and restored as a copy of the 8 before them. That is unbiased, and exact
// where the sum is a bf16. Each store has a relative error below 2^-15, and of 2^-16.3 root mean
// square; that of a bf16 is up to 2^-8.
//
// These functions define the format. kernels/cuda/head/split_sums_sm90.cuh does the same to
// registers of two and four sums by byte permutations; the chunk tests on a GPU compare the two.
//
// Inputs are results of arithmetic: a NaN whose upper 16 bits are those of an infinity would become
// one.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/host_device.h"

namespace logitless {

LOGITLESS_HOST_DEVICE inline std::uint32_t sum_bits(float sum) {
  std::uint32_t bits;
  std::memcpy(&bits, &sum, sizeof(bits));
  return bits;
}
LOGITLESS_HOST_DEVICE inline std::uint16_t split_high(float sum) {
  return static_cast<std::uint16_t>(sum_bits(sum) >> 16);
}
LOGITLESS_HOST_DEVICE inline std::uint8_t split_low(float sum) {
  return static_cast<std::uint8_t>(sum_bits(sum) >> 8);
}
LOGITLESS_HOST_DEVICE inline float join_sum(std::uint16_t high, std::uint8_t low) {
  const std::uint32_t bits = std::uint32_t{high} << 16 | std::uint32_t{low} << 8 | low;
  float sum;
  std::memcpy(&sum, &bits, sizeof(sum));
  return sum;
}

}  // namespace logitless

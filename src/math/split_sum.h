// A sum kept in 24 bits: the upper 16 of its fp32 bits, which are a bf16, and the 8 after them. The
// last 8 are dropped, and taken to be a repetition of the 8 before: as often too much as too
// little, and nothing where the sum is a bf16. A sum is off by less than 2^-15 of itself for each
// time it is put away, by 2^-16.3 in the root of the mean square; a bf16 is off by up to 2^-8.
//
// These functions are the meaning; kernels/cuda/head/split_sums_sm90.cuh does the same to words of
// two and four sums by byte permutations, and is held to it by the chunk tests on a GPU.
//
// Inputs are the results of arithmetic: a NaN whose upper 16 bits were those of an infinity would
// become one.
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

// Arithmetic of the Gumbel-max trick for an entry: random numbers, noise, and scores that compare
// as integers.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/fast_math.cuh"

namespace logitless::cuda {

// The key of a token's noise.
struct NoiseKey {
  std::uint32_t first, second;
};

// The bits that bound the noise by 0, for entries without any.
inline constexpr std::uint32_t kNoNoise = 0x7FFFFF;

// Returns 23 random bits of an entry by Threefry-2x32 with 20 rounds, those of Function::random
// (compiler/ir/function.cpp), whose number they are 2^23 times.
__device__ __forceinline__ std::uint32_t random_bits(const NoiseKey& key, std::uint32_t counter) {
  const std::uint32_t keys[3] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDAu};
  std::uint32_t x = keys[0], y = counter + keys[1];
#pragma unroll
  for (std::uint32_t group = 0; group < 5; ++group) {
    const bool odd = group % 2 != 0;
    const auto mix = [&](int by) {
      x += y;
      y = __funnelshift_l(y, y, by) ^ x;
    };
    mix(odd ? 17 : 13);
    mix(odd ? 29 : 15);
    mix(odd ? 16 : 26);
    mix(odd ? 24 : 6);
    x += keys[(group + 1) % 3];
    y += keys[(group + 2) % 3] + group + 1;
  }
  return (x ^ y) >> 9;
}

// Returns the noise -log(-log(1 - v)) of an entry, fp32. v has `bits` of random_bits as its first
// half, and those of the next key as its second one.
__device__ __forceinline__ float gumbel_noise(std::uint32_t bits, const NoiseKey& key,
                                              std::uint32_t counter) {
  constexpr float kStep = 0x1p-23f;
  constexpr float kMost = 1.0f - 0x1p-24f;  // rounding may make v 1
  const auto more = static_cast<float>(random_bits({key.first, key.second + 1}, counter)) * kStep;
  const float v = static_cast<float>(bits) * kStep + (more + kStep / 2) * kStep;
  return -logf(-log1pf(-fminf(v, kMost)));
}
// No noise is less, whatever the rounding.
inline constexpr float kLeastNoise = -2.9f;

// An entry by its score, of which the greater wins, then the lower id. NaN is the greatest score.
using ScoredEntry = unsigned long long;
__device__ __forceinline__ ScoredEntry scored_entry(float score, std::uint32_t vocab_id) {
  const std::uint32_t bits = __float_as_uint(score);
  const std::uint32_t order = isnan(score) ? ~0u : bits ^ (bits >> 31 != 0 ? ~0u : 0x80000000u);
  return static_cast<ScoredEntry>(order) << 32 | ~vocab_id;
}
__device__ __forceinline__ float score_of(ScoredEntry entry) {
  const auto order = static_cast<std::uint32_t>(entry >> 32);
  return __uint_as_float(order ^ (order >> 31 != 0 ? 0x80000000u : ~0u));
}
__device__ __forceinline__ std::uint32_t vocab_id_of(ScoredEntry entry) {
  return ~static_cast<std::uint32_t>(entry);
}

// Returns whether an entry's score may be at least `best`, from the first half of its random bits.
// Its noise is at most -log(v), and v at least bits 2^-23. `exponent` is (s - best) log2(e) plus a
// margin for the rounding of scores, which are below 2^6. The numbers compared are those plus 1,
// which spares a conversion, and one step for their rounding. True for NaN.
inline constexpr float kScoreMargin = 0x1p-10f;
__device__ __forceinline__ bool may_win(std::uint32_t bits, float exponent) {
  constexpr float kAbove = 1.0f + 0x1p-22f;
  return !(__uint_as_float(0x3F800000u | bits) > exp2_fast(exponent) + kAbove);
}

}  // namespace logitless::cuda

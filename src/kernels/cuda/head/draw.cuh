// Arithmetic of the Gumbel-max trick: random numbers of entries, noise, and scores that compare as
// integers.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/fast_math.cuh"

namespace logitless::cuda {

// The key of a token's noise.
struct NoiseKey {
  std::uint32_t first, second;
};

// The keys of Philox's rounds. Volatile sums stay in registers: the compiler would repeat them in a
// loop, where they are a third of the integer pipe's work.
struct RoundKeys {
  static constexpr int kRounds = 10;
  __device__ __forceinline__ explicit RoundKeys(const NoiseKey& key)
      : first{key.first}, second{key.second} {
#pragma unroll
    for (int round = 1; round < kRounds; ++round) {
      asm volatile("add.u32 %0, %1, 0x9E3779B9;" : "=r"(first[round]) : "r"(first[round - 1]));
      asm volatile("add.u32 %0, %1, 0xBB67AE85;" : "=r"(second[round]) : "r"(second[round - 1]));
    }
  }
  std::uint32_t first[kRounds], second[kRounds];
};

// The results of Philox-4x32 with 10 rounds of the counter (block, part, 0, 0). Random numbers are
// those of Function::uniform (compiler/ir/function.h).
struct PhiloxBlock {
  __device__ __forceinline__ PhiloxBlock(const RoundKeys& keys, std::uint32_t block,
                                         std::uint32_t part)
      : x{block, part, 0, 0} {
#pragma unroll
    for (int round = 0; round < RoundKeys::kRounds; ++round) {
      const std::uint64_t a = std::uint64_t{0xD2511F53u} * x[0];
      const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * x[2];
      x[0] = static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ keys.first[round];
      x[1] = static_cast<std::uint32_t>(b);
      x[2] = static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ keys.second[round];
      x[3] = static_cast<std::uint32_t>(a);
    }
  }
  std::uint32_t x[4];
};

// Entries that share a block of random numbers: pairs 8 w + (0, 1), w below 4, from the first one
// on, as a thread has them in a fragment of mma's results.
inline constexpr int kSharedEntries = 8;
__device__ __forceinline__ int shared_offset(int slot) { return slot / 2 * 8 + slot % 2; }
__device__ __forceinline__ std::uint32_t block_of(std::uint32_t entry) {
  return entry / 32 * 4 + entry % 8 / 2;
}

// The upper 16 random bits of kSharedEntries entries, which bound their noise. All are 1 without
// noise: nothing branches there, so that Philox runs while loads are on their way.
struct UpperBits {
  __device__ __forceinline__ UpperBits(const RoundKeys& keys, std::uint32_t block, bool noise)
      : made(keys, block, 0), set(noise ? 0 : 0xFFFFu) {}

  __device__ __forceinline__ std::uint32_t of(int slot) const {
    // Registers have no index.
    const std::uint32_t pair = slot < 4   ? (slot < 2 ? made.x[0] : made.x[1])
                               : slot < 6 ? made.x[2]
                                          : made.x[3];
    return (slot % 2 == 0 ? pair & 0xFFFFu : pair >> 16) | set;
  }
  __device__ __forceinline__ std::uint32_t least() const {
    const std::uint32_t pair =
        __vminu2(__vminu2(made.x[0], made.x[1]), __vminu2(made.x[2], made.x[3]));
    return min(pair & 0xFFFFu, pair >> 16) | set;
  }

 private:
  PhiloxBlock made;
  std::uint32_t set;
};

// Returns the noise -log(-log(1 - v)) of an entry, fp32, from its upper 16 random bits and 23 more.
__device__ __forceinline__ float gumbel_noise(std::uint32_t upper, const RoundKeys& keys,
                                              std::uint32_t entry) {
  constexpr float kMost = 1.0f - 0x1p-24f;  // rounding may make v 1
  const std::uint32_t slot = entry / 8 % 4 * 2 + entry % 2;
  const PhiloxBlock made(keys, block_of(entry), 1 + slot / 4);
  const std::uint32_t low = slot % 2 == 0 ? made.x[0] : made.x[1];
  const std::uint32_t high = slot % 2 == 0 ? made.x[2] : made.x[3];
  const auto more = static_cast<float>((slot / 2 % 2 == 0 ? low : high) >> 9);
  const float v = (static_cast<float>(upper) + (more + 0.5f) * 0x1p-23f) * 0x1p-16f;
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

// Returns whether an entry's score may be at least `best`, from its upper random bits. Its noise is
// at most -log(v), and v at least upper 2^-16. `exponent` is (s - best) log2(e) plus a margin for
// the rounding of scores, which are below 2^6. The numbers compared are those plus 1, which spares
// a conversion, and one step for their rounding. True for NaN. Never less often for fewer bits or a
// greater exponent, so the least bits and the greatest s of some entries bound all of them.
inline constexpr float kScoreMargin = 0x1p-10f;
__device__ __forceinline__ bool may_win(std::uint32_t upper, float exponent) {
  constexpr float kAbove = 1.0f + 0x1p-22f;
  return !(__uint_as_float(0x3F800000u | upper << 7) > exp2_fast(exponent) + kAbove);
}

}  // namespace logitless::cuda

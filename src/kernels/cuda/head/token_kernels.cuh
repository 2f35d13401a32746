// Small kernels around the forward tiles, a few microseconds each: target logits, reference
// exponents, and the reduction of the tiles' partial sums to outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/targets.cuh"
#include "math/log_prob.h"
#include "math/lse_state.h"
#include "math/shard_state.h"
#include "math/softcap.h"

namespace logitless::cuda {

// Flags of a chunk's pairs of token tiles, each [token pairs + 1]: the last element is 1 + the last
// pair with a flag, or 0.
struct TokenFlags {
  int* active = nullptr;                // 1 for 256 tokens with a target
  int* repair = nullptr;                // 1 for 256 tokens with a sum out of range
  std::uint8_t* repair_rows = nullptr;  // [padded tokens]: 1 for the tokens themselves
  int token_pairs = 0;
};

// Resets the values that guess_reference accumulates.
__device__ __forceinline__ void clear(const ForwardCall& c, const TokenFlags& flags) {
  flags.active[flags.token_pairs] = 0;
  flags.repair[flags.token_pairs] = 0;
  if (c.first_token == 0) *c.bad_target = kNoBadTarget;
}
// Run by one thread, where target_logits is not run.
__global__ void clear_flags(const ForwardCall c, const TokenFlags flags) { clear(c, flags); }

// Two adjacent elements of a row as floats; 0 past its end. `paired`: rows are aligned to pairs.
template <typename T>
__device__ __forceinline__ float2 two_elements(const T* row, std::int64_t k, std::int64_t dim,
                                               bool paired) {
  struct alignas(2 * sizeof(T)) Pair {
    T x, y;
  };
  if (paired) {
    const Pair pair = *reinterpret_cast<const Pair*>(row + k);
    return make_float2(as_float(pair.x), as_float(pair.y));
  }
  return make_float2(as_float(row[k]), k + 1 < dim ? as_float(row[k + 1]) : 0.0f);
}

// Returns the logit of a target to all lanes of a warp, 0 where the shard has no row for it.
template <typename T>
__device__ __forceinline__ float logit_of_slot(const ForwardCall& c, std::int64_t slot, int lane) {
  const std::int64_t vocab_id = target_of(c, slot);
  if (!is_local(c, vocab_id)) return 0.0f;
  const std::int64_t row = row_of_vocab_id(c, vocab_id);
  const std::int64_t token = slot / c.shape.targets_per_token;
  const T* const x = static_cast<const T*>(c.hidden) + token * c.hidden_stride;
  const T* const w = static_cast<const T*>(c.weight) + row * c.weight_stride;
  const auto starts = reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(w);
  float z = 0.0f;
  const auto add = [&](std::int64_t k, bool paired) {
    const float2 a = two_elements(x, k, c.shape.dim, paired);
    const float2 b = two_elements(w, k, c.shape.dim, paired);
    z = fmaf(a.x, b.x, fmaf(a.y, b.y, z));
  };
  if (c.shape.dim % 2 == 0 && starts % (2 * sizeof(T)) == 0) {
#pragma unroll 16  // few tokens wait for memory: many loads are under way
    for (std::int64_t k = lane * 2; k < c.shape.dim; k += 64) add(k, true);
  } else {
    for (std::int64_t k = lane * 2; k < c.shape.dim; k += 64) add(k, false);
  }
  for (int step = 16; step > 0; step /= 2) z += __shfl_xor_sync(~0u, z, step);
  if (c.bias != nullptr) z += c.bias[row];
  return softcap(z * c.logit_scale, c.softcap);
}

// A warp for each target: logits [tokens, K]. Resets the flags, if there are any.
template <typename T>
__global__ void __launch_bounds__(256)
    target_logits(const ForwardCall c, float* logits, const TokenFlags flags) {
  if (flags.active != nullptr && blockIdx.x == 0 && threadIdx.x == 0) clear(c, flags);
  const std::int64_t slot = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (slot >= c.shape.tokens * c.shape.targets_per_token) return;
  const int lane = threadIdx.x % 32;
  const float z = logit_of_slot<T>(c, slot, lane);
  if (lane == 0) logits[slot] = z;
}

// Partial results of the tiles of one call, [vocabulary tiles][padded tokens] each.
struct Partials {
  std::int64_t padded_tokens;
  int vocab_tiles;
  const float* sums;
  const float* entropy;
  const float* weighted;
  const float* best;
  const int* best_index;
};

inline constexpr int kRowsPerBlock = 32;
inline constexpr int kParts = 32;  // threads of one token, each with a run of tiles

// Exponent of 2 of a logit, rounded up; 0 where the logit is not finite.
__device__ __forceinline__ float reference_of(float logit) {
  const float exponent = ceilf(logit * static_cast<float>(kLog2E));
  return isfinite(exponent) ? exponent : 0.0f;
}

// Returns true if the target logits of a call include this one: given, or computed from local rows.
__device__ __forceinline__ bool has_logit(const ForwardCall& c, std::int64_t vocab_id) {
  return c.given_logits != nullptr ? is_target(c, vocab_id) : is_local(c, vocab_id);
}

// Returns true if a token has a target. Notes targets out of range in bad_target.
__device__ __forceinline__ bool check_targets(const ForwardCall& c, std::int64_t row) {
  if (row >= c.shape.tokens) return false;
  const int per_token = c.shape.targets_per_token;
  bool any = false;
  for (std::int64_t slot = row * per_token; slot < (row + 1) * per_token; ++slot) {
    const std::int64_t vocab_id = target_of(c, slot);
    if (is_target(c, vocab_id)) {
      any = true;
    } else if (is_bad(c, vocab_id)) {
      const std::int64_t position = place_of(c, slot) + (c.sequence > 0 ? 1 : 0);
      atomicMin(reinterpret_cast<unsigned long long*>(c.bad_target),
                static_cast<unsigned long long>(position));
    }
  }
  return any;
}

// Sets the flags of a pair of tiles, by a thread block of 256. `any`: of each thread's token.
__device__ __forceinline__ void set_flags(const TokenFlags& flags, int pair, bool any) {
  any = __syncthreads_or(any) != 0;
  if (threadIdx.x > 0) return;
  flags.active[pair] = any;
  flags.repair[pair] = 0;
  if (any) atomicMax(flags.active + flags.token_pairs, pair + 1);
}

// reference[token] = the exponent of the greatest of its target logits, 0 where there is none. It
// is seldom more than some tens of bits below the greatest logit's. A thread block for each pair of
// tiles sets its flags.
__global__ void __launch_bounds__(256)
    guess_reference(const ForwardCall c, const float* target_logits, const TokenFlags flags,
                    float* reference) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int per_token = c.shape.targets_per_token;
  float top = -INFINITY;
  for (int k = 0; row < c.shape.tokens && k < per_token; ++k) {
    const std::int64_t slot = row * per_token + k;
    if (has_logit(c, target_of(c, slot))) top = fmaxf(top, target_logits[slot]);
  }
  reference[row] = reference_of(top);
  flags.repair_rows[row] = 0;
  set_flags(flags, static_cast<int>(blockIdx.x), check_targets(c, row));
}

// target_logits and guess_reference in one launch, of few tokens with one target each: a warp for
// each padded token. The first thread block sets the flags of all.
inline constexpr std::int64_t kFewTokens = 1024;
template <typename T>
__global__ void __launch_bounds__(256)
    target_logits_of_few(const ForwardCall c, float* logits, const TokenFlags flags,
                         float* reference) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) clear(c, flags);
    __syncthreads();
    for (int pair = 0; pair < flags.token_pairs; ++pair)
      set_flags(flags, pair, check_targets(c, pair * 256 + static_cast<int>(threadIdx.x)));
  }
  const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const float z = row < c.shape.tokens ? logit_of_slot<T>(c, row, lane) : 0.0f;
  if (lane > 0) return;
  if (row < c.shape.tokens) logits[row] = z;
  reference[row] = reference_of(z);
  flags.repair_rows[row] = 0;
}

// Blocks of f16, whose range is small: exponentials are stored so that the sum of a row is about
// 2^kHalfExponent, and at most 2^kMostHalfExponent, which no element exceeds then.
inline constexpr float kHalfExponent = 12.0f;
inline constexpr float kMostHalfExponent = 15.0f;

// reference[token] = the exponent of the greatest logit, 0 where there is none, for the tokens to
// repair. All others keep theirs, so that their bits do not depend on their neighbours. `lifts`,
// unless null, gets kHalfExponent.
__global__ void __launch_bounds__(kRowsPerBlock* kParts)
    set_reference(const float* best, int vocab_tiles, std::int64_t padded_tokens,
                  const TokenFlags flags, float* lifts, float* reference) {
  __shared__ float tops[kParts][kRowsPerBlock];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x;
  // a thread block is within one pair of tiles
  if (flags.repair[row / 256] == 0) return;
  const int run = (vocab_tiles + kParts - 1) / kParts;
  const int end = min(vocab_tiles, (static_cast<int>(threadIdx.y) + 1) * run);
  float top = -INFINITY;
  for (int t = threadIdx.y * run; t < end; ++t) top = fmaxf(top, best[t * padded_tokens + row]);
  tops[threadIdx.y][threadIdx.x] = top;
  __syncthreads();
  if (threadIdx.y > 0 || flags.repair_rows[row] == 0) return;
  for (int p = 1; p < kParts; ++p) top = fmaxf(top, tops[p][threadIdx.x]);
  reference[row] = reference_of(top);
  if (lifts != nullptr) lifts[row] = kHalfExponent;
}

// Bounds of a token's sum. Outside them fp32 has too little range left for the exponentials or
// their factors: the reference was far from the greatest logit.
inline constexpr double kLeastSum = 0x1p-20;
inline constexpr double kMostSum = 0x1p60;

// Returns true if a token's reference came from given logits. Sums of a vocabulary shard may then
// be arbitrarily small, since the global sum is at least 1/2.
__device__ __forceinline__ bool has_given_reference(const ForwardCall& c, std::int64_t row) {
  if (c.given_logits == nullptr) return false;
  float top = -INFINITY;
  const std::int64_t first = row * c.shape.targets_per_token;
  for (int k = 0; k < c.shape.targets_per_token; ++k)
    if (is_target(c, target_of(c, first + k))) top = fmaxf(top, c.given_logits[first + k]);
  return isfinite(top);
}

// Breaks ties by token id, since tiles by position do not ascend in ids.
__device__ __forceinline__ bool leads(float best, int index, float than, int its_index) {
  return best > than || (best == than && index < its_index);
}

// Adds up the partials in a fixed order, in double, and writes the outputs. `wanted` restricts this
// to some pairs of tiles; null: all tokens. `more` [padded tokens], unless null, is added to the
// sums. Sums out of range are flagged in `found`, unless its pointers are null. `exponents` [padded
// tokens], unless null, gets log2 of the sums.
__global__ void __launch_bounds__(kRowsPerBlock* kParts)
    write_outputs(const ForwardCall c, const Partials p, const float* reference,
                  const float* target_logits, const int* wanted, const TokenFlags found,
                  const int* active, const float* more, float* exponents) {
  struct Part {
    double sum, entropy, weighted;
    float best;
    int index;
  };
  __shared__ Part parts[kParts][kRowsPerBlock];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x;
  if (wanted != nullptr && wanted[row / 256] == 0) return;
  const bool made = active[row / 256] != 0;
  const int run = (p.vocab_tiles + kParts - 1) / kParts;
  const bool sums = made && row < c.shape.tokens;  // others may have no partial results
  const int end = sums ? min(p.vocab_tiles, (static_cast<int>(threadIdx.y) + 1) * run) : 0;
  Part mine{0.0, 0.0, 0.0, -INFINITY, 0x7fffffff};
  for (int t = threadIdx.y * run; t < end; ++t) {
    const std::int64_t at = t * p.padded_tokens + row;
    mine.sum += p.sums[at];
    if (p.entropy != nullptr) mine.entropy += p.entropy[at];
    if (p.weighted != nullptr) mine.weighted += p.weighted[at];
    if (p.best != nullptr && leads(p.best[at], p.best_index[at], mine.best, mine.index)) {
      mine.best = p.best[at];
      mine.index = p.best_index[at];
    }
  }
  parts[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y > 0 || row >= c.shape.tokens) return;
  for (int q = 1; q < kParts; ++q) {
    const Part& other = parts[q][threadIdx.x];
    mine.sum += other.sum;
    mine.entropy += other.entropy;
    mine.weighted += other.weighted;
    if (leads(other.best, other.index, mine.best, mine.index)) {
      mine.best = other.best;
      mine.index = other.index;
    }
  }
  if (more != nullptr && made) mine.sum += more[row];
  if (found.repair != nullptr && made &&
      (mine.sum > kMostSum || (mine.sum < kLeastSum && !has_given_reference(c, row)))) {
    found.repair_rows[row] = 1;
    found.repair[row / 256] = 1;
    atomicMax(found.repair + found.token_pairs, static_cast<int>(row / 256) + 1);
  }

  if (exponents != nullptr) exponents[row] = made ? static_cast<float>(log2(mine.sum)) : 0.0f;
  const int per_token = c.shape.targets_per_token;
  const bool valid_row = has_target(c, row);
  const double lse = (reference[row] + log2(mine.sum)) * kLn2;
  write_lse(c, row, valid_row ? lse : 0.0);
  if (c.entropy != nullptr)
    c.entropy[row] =
        valid_row ? static_cast<float>(entropy_of(mine.sum, mine.entropy / mine.sum)) : 0.0f;
  if (c.weighted_sum != nullptr)
    c.weighted_sum[row] = valid_row ? static_cast<float>(mine.weighted) : 0.0f;
  if (c.argmax != nullptr) c.argmax[row] = valid_row ? vocab_id_of_row(c, mine.index) : -1;
  for (int k = 0; k < per_token; ++k) {
    const std::int64_t slot = row * per_token + k;
    const std::int64_t vocab_id = target_of(c, slot);
    const bool valid = has_logit(c, vocab_id);
    const float z = target_logits[slot];
    if (c.target_logit != nullptr) c.target_logit[slot] = valid ? z : 0.0f;
    if (c.log_prob != nullptr)
      c.log_prob[slot] =
          valid ? static_cast<float>(log_prob_of(z, lse)) : without_logit(c, vocab_id);
  }
}

// The bias of every `every`th entry. One thread block.
__global__ void __launch_bounds__(kTileColumns)
    sample_bias(const float* bias, std::int64_t every, int count, float* sampled) {
  if (static_cast<int>(threadIdx.x) < count) sampled[threadIdx.x] = bias[threadIdx.x * every];
}

// Sets the lifts of f16 blocks from an estimate of the log-sum-exp: the target's exponential, and
// the sum over `sampled` entries of `vocab`, which `sums` has relative to the references.
__global__ void __launch_bounds__(256)
    estimate_lifts(const float* sums, float sampled, float vocab, const int* active, float* lifts) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const float bits =
      active[blockIdx.x] == 0 ? 0.0f : ceilf(log2f(1.0f + sums[row] * (vocab / sampled)));
  lifts[row] = kHalfExponent - (isfinite(bits) ? bits : 0.0f);
}

// Divides rows of an f16 block by a power of two where their sums are above the range. Sets the
// references to what the block holds. Shifts [tokens, segments] are of 64 entries each, see
// ForwardArguments. A thread block for each token.
__global__ void __launch_bounds__(256)
    level_rows(const ForwardCall c, const float* exponents, const float* lifts,
               const std::uint8_t* shifts, std::int64_t segments, std::int64_t stored_vocab,
               const int* active, float* reference) {
  const std::int64_t row = blockIdx.x;
  if (active[row / 256] == 0) return;
  const float exponent = exponents[row] + lifts[row];
  const bool above = exponent > kMostHalfExponent && isfinite(exponent);
  const int by = above ? static_cast<int>(ceilf(exponent - kMostHalfExponent)) + 1 : 0;
  if (threadIdx.x == 0) reference[row] += static_cast<float>(by) - lifts[row];
  if (!above) return;
  constexpr int kVector = 8;
  struct alignas(16) Vector {
    __half values[kVector];
  };
  for (std::int64_t j = threadIdx.x * kVector; j < stored_vocab; j += 256 * kVector) {
    __half* at = static_cast<__half*>(c.block.data) + row * c.block.stride + j;
    if (c.ranges.count > 0) {
      int r = 0;
      while (r + 1 < c.ranges.count && j >= c.ranges.first[r + 1]) ++r;
      at =
          static_cast<__half*>(c.ranges.data[r]) + row * c.ranges.stride(r) + j - c.ranges.first[r];
    }
    const float factor = exp2f(static_cast<float>(shifts[row * segments + j / 64]) - by);
    if (reinterpret_cast<std::uintptr_t>(at) % sizeof(Vector) != 0) {
      for (int k = 0; k < kVector; ++k) at[k] = __float2half(__half2float(at[k]) * factor);
      continue;
    }
    Vector v = *reinterpret_cast<const Vector*>(at);
#pragma unroll
    for (__half& value : v.values) value = __float2half(__half2float(value) * factor);
    *reinterpret_cast<Vector*>(at) = v;
  }
}

// Threads of one token that add up its record.
inline constexpr int kRecordParts = 8;

// Writes c.records from the partials, for tokens without a repair. Sums of tiles are added in fixed
// point, so that their bits do not depend on how tiles are distributed over calls. `more` as in
// write_outputs.
__global__ void __launch_bounds__(kRowsPerBlock* kRecordParts)
    write_records(const ForwardCall c, const Partials p, const float* reference, const int* active,
                  const float* more) {
  // Shared memory cannot hold types with constructors.
  __shared__ alignas(TokenRecord)
      std::byte memory[kRecordParts * kRowsPerBlock * sizeof(TokenRecord)];
  auto* const parts = reinterpret_cast<TokenRecord*>(memory) + threadIdx.x;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x;
  const int run = (p.vocab_tiles + kRecordParts - 1) / kRecordParts;
  const bool sums = active[row / 256] != 0 && row < c.shape.tokens;
  const int end = sums ? min(p.vocab_tiles, (static_cast<int>(threadIdx.y) + 1) * run) : 0;
  TokenRecord mine;
  if (more != nullptr && threadIdx.y == 0 && end > 0) mine.wide.add(more[row], reference[row]);
  for (int t = threadIdx.y * run; t < end; ++t) {
    const std::int64_t at = t * p.padded_tokens + row;
    mine.wide.add(p.sums[at], reference[row]);
    if (p.entropy != nullptr) mine.state.entropy += p.entropy[at];
    if (p.weighted != nullptr) mine.state.weighted += p.weighted[at];
    if (p.best != nullptr &&
        leads(p.best[at], p.best_index[at], mine.state.best, mine.state.vocab_id)) {
      mine.state.best = p.best[at];
      mine.state.vocab_id = p.best_index[at];
    }
  }
  parts[threadIdx.y * kRowsPerBlock] = mine;
  __syncthreads();
  if (threadIdx.y > 0 || row >= c.shape.tokens) return;
  for (int q = 1; q < kRecordParts; ++q) {
    const TokenRecord& other = parts[q * kRowsPerBlock];
    mine.wide.add(other.wide);
    mine.state.entropy += other.state.entropy;
    mine.state.weighted += other.state.weighted;
    if (leads(other.state.best, other.state.vocab_id, mine.state.best, mine.state.vocab_id)) {
      mine.state.best = other.state.best;
      mine.state.vocab_id = other.state.vocab_id;
    }
  }
  mine.state.exponent = reference[row];
  mine.state.sum = static_cast<float>(mine.wide.scaled(reference[row]));
  if (mine.state.vocab_id != INT32_MAX)
    mine.state.vocab_id = vocab_id_of_row(c, mine.state.vocab_id);
  c.records[row] = mine;
}

}  // namespace logitless::cuda

// Epilogue of the kernels that compute logits: the work on a tile of 128 tokens x 256 vocabulary
// entries in the accumulators of a CTA. Per token and tile it writes the partial results of
// log-sum-exp, entropy, weighted sum and argmax. For gradients it also leaves exp(z) or the
// gradient of the logits in the registers. Logits never leave the SM.
//
// Exponentials are relative to a reference exponent of each token that is fixed beforehand. So the
// sums of all tiles add up directly, and no running maximum is needed. References come from the
// target logits. Where a sum leaves the range of fp32, a launch with kReference finds the greatest
// logit, and the tokens are recomputed.
//
// The kernels differ in how a tile lies over the threads. Functions take that as a class, Position,
// which derives from TilePosition:
// - `kRows` x `kColumns` are the results of a thread, 128 in all.
// - `kHalves` and `half(i)` say whether its columns lie in one half of the tile's 256 entries.
// - `kSegments` and `segment(s)` say the same of the tile's quarters.
// - `reg(h, i)` is the register of row h and column i, `column(i)` a distance from `first`.
// - `token(h)` is the token of row h. Columns 2 i and 2 i + 1 are adjacent.
// - `put_sum`, `put_greatest`, `put_best` and `put_masses` reduce a row over its threads, and write
//   the result.
// - `row_total` gives the result to all of them. `readers_done` waits for them, and one `writes`.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/fast_math.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/tile_kernel.h"
#include "kernels/device/far.h"
#include "math/lse_state.h"

namespace logitless::cuda {

// 256 vocabulary entries for a pair of token tiles.
struct Tile {
  int pair;
  int vocab_id;  // vocabulary tile
  bool sampled;  // of the far field: sampled, not selected
};
// Returns the pairs of token tiles of a launch up to the last one that is not skipped.
__device__ __forceinline__ int pairs_of(const ForwardArguments& a) {
  return a.wanted == nullptr ? a.launch_pairs
                             : max(0, min(a.launch_pairs, a.wanted[a.token_pairs] - a.first_pair));
}
// Maps a tile index of a launch of so many pairs to a tile. The order keeps a group of token tiles
// in L2 while the weights stream past.
__device__ __forceinline__ Tile tile_of(int index, const ForwardArguments& a, int pairs) {
  if (a.list != nullptr) {
    const std::uint32_t entry = a.list[index];
    return {block_of_entry(entry), group_of_entry(entry) - a.first_tile, sampled_entry(entry)};
  }
  const int group_size = a.group * a.vocab_tiles;
  const int first = index / group_size * a.group;
  const int rows = min(a.group, pairs - first);
  const int within = index % group_size;
  return {a.first_pair + first + within % rows, within / rows, false};
}

// A thread's tile. The kernels derive their Position from it.
struct TilePosition {
  __device__ __forceinline__ TilePosition(const ForwardArguments& a, std::int64_t token,
                                          const Tile& tile, int column)
      : row(token),
        vocab_id(tile.vocab_id),
        first(tile.vocab_id * kTileColumns + column),
        out(tile.vocab_id * a.padded_tokens + token),
        factor((tile.sampled ? a.sampled : 1.0f) *
               (a.block_scale == nullptr ? 1.0f : *a.block_scale)),
        normalizes(tile.sampled && a.masses != nullptr),
        whole((tile.vocab_id + 1) * kTileColumns <= a.vocab) {}
  std::int64_t row;  // token of row 0
  int vocab_id;      // vocabulary tile
  int first;         // vocabulary entry of column 0
  std::int64_t out;  // index in the arrays of partial results, of row 0
  float factor;      // of gradients
  bool normalizes;   // gradients are normalised with the tile's exact mass
  bool whole;        // the tile is full, not clipped by vocab
};
// Partial results that are sums over a row of a tile.
enum class RowSum { kSum, kEntropy, kWeighted };

// Returns the factor of a token's gradients in a sampled tile where masses are estimates. The
// tile's exact mass, of which each lane holds `part`, replaces its estimate in the token's total.
// Overwrites the tile's masses with the estimate's error and the exact mass, relative to the total.
template <class Position>
__device__ __forceinline__ float normalize_sampled(float part, const ForwardArguments& a,
                                                   const Position& at, int h,
                                                   const RowCoefficients& c) {
  float* const masses = a.masses + 2 * a.groups[at.vocab_id] * a.padded_tokens + at.token(h);
  const float sum = masses[0] + masses[a.padded_tokens];
  const float estimate = sum * exp2_fast(c.less_lse(a.reference[at.token(h)]));
  const float exact = at.row_total(part, h);
  at.readers_done();
  if (at.writes()) {
    masses[0] = exact - estimate;
    masses[a.padded_tokens] = exact;
  }
  const float total = fmaxf(1.0f + (exact - estimate), exact);
  return total > 0.0f ? 1.0f / total : isnan(total) ? total : 1.0f;
}

// Returns the scale that z still has to be multiplied by. One that is not a power of two is applied
// here, which rounds all logits as the target's is: equal ones stay equal.
__device__ __forceinline__ float rest_of_scale(float (&z)[128], const ForwardArguments& a) {
  constexpr unsigned kMantissa = 0x7fffff;
  if ((__float_as_uint(a.scale) & kMantissa) == 0) return a.scale;
#pragma unroll
  for (int i = 0; i < 128; ++i) z[i] *= a.scale;
  return 1.0f;
}

__device__ __forceinline__ float total(const float (&halves)[1]) { return halves[0]; }
__device__ __forceinline__ float total(const float (&halves)[2]) { return halves[0] + halves[1]; }

// Writes the greatest logit of a row, whose threads each have one. The lowest token id wins ties.
template <class Position>
__device__ __forceinline__ void put_argmax(float top, int index, const ForwardArguments& a,
                                           const Position& at, int h) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other = __shfl_xor_sync(~0u, top, step);
    const int other_index = __shfl_xor_sync(~0u, index, step);
    if (other > top || (other == top && other_index < index)) {
      top = other;
      index = other_index;
    }
  }
  at.put_best(a, top, index, h);
}

// Unlike fmaxf it returns NaN for NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// Replaces z by its exponentials; 0 past the vocabulary's end. With kPlainBest, the scale is
// positive and positions are token ids.
template <ForwardMode kMode, class Position>
__device__ __forceinline__ void sum_plain(float (&z)[128], const ForwardArguments& a,
                                          const Position& at) {
  constexpr bool kBest = kMode == ForwardMode::kPlainBest;
  constexpr bool kEntropy = kBest || kMode == ForwardMode::kPlainEntropy;
  const float scale = rest_of_scale(z, a);
  const float factor = scale * kLog2EFloat;
  const float none = copysignf(3e38f, -factor);  // its exponential is 0, and so is 0 times it
  const auto exists = [&](int i) { return at.first + Position::column(i) < a.vocab; };
  if (!kEntropy && !at.whole) {  // inside the loop below it is slower, but spills less
#pragma unroll
    for (int i = 0; i < Position::kColumns; ++i) {
#pragma unroll
      for (int h = 0; h < Position::kRows; ++h)
        if (!exists(i)) z[Position::reg(h, i)] = none;
    }
  }
#pragma unroll
  for (int h = 0; h < Position::kRows; ++h) {
    const float k = a.reference[at.token(h)];
    float sum[Position::kHalves] = {};  // of 128 entries each
    float entropy = 0.0f;
    float top = -INFINITY;
    int index = at.first;
#pragma unroll
    for (int i = 0; i < Position::kColumns; ++i) {
      const int reg = Position::reg(h, i);
      if constexpr (kBest) {
        if (z[reg] > top && (at.whole || exists(i))) {
          top = z[reg];
          index = at.first + Position::column(i);
        }
      }
      const float product = !kEntropy || at.whole || exists(i) ? z[reg] : none;
      float bits = fmaf(product, factor, -k);
      if constexpr (kEntropy) bits = max_or_nan(bits, -3e38f);  // so that 0 times it is 0
      const float e = exp2_fast(bits);
      sum[Position::half(i)] += e;
      if constexpr (kEntropy) entropy = fmaf(e, bits, entropy);
      z[reg] = e;
    }
    if (a.masses != nullptr) at.put_masses(a, sum, h);
    at.put_sum(RowSum::kSum, a.sums, total(sum), h);
    if constexpr (kBest) put_argmax(top * scale, index, a, at, h);
    if constexpr (kEntropy) {
      if (!kBest || a.entropy != nullptr) at.put_sum(RowSum::kEntropy, a.entropy, entropy, h);
    }
  }
}

// Returns the logit of a result with its bias. The factor is that of the next function.
template <bool kCapped>
__device__ __forceinline__ float scaled_and_capped(float v, float factor, float cap) {
  v *= factor;
  return kCapped ? cap * tanh_fast(v) : v;
}
template <bool kCapped>
__device__ __forceinline__ float factor_of(float scale, float cap) {
  return kCapped ? scale / cap : scale;
}
// z = softcap(scale * (z + bias)); -inf past the vocabulary's end. kCapped is a template parameter,
// since functions of a capped logit are much longer.
template <bool kCapped, class Position>
__device__ __forceinline__ void transform(float (&z)[128], const ForwardArguments& a,
                                          const Position& at) {
  const float factor = factor_of<kCapped>(a.scale, a.cap);
#pragma unroll
  for (int i = 0; i < Position::kColumns; ++i) {
    const int vocab_id = at.first + Position::column(i);
    const bool valid = at.whole || vocab_id < a.vocab;
#pragma unroll
    for (int h = 0; h < Position::kRows; ++h) {
      float& to = z[Position::reg(h, i)];
      float v = to;
      if (a.bias != nullptr && valid) v += a.bias[vocab_id];
      v = scaled_and_capped<kCapped>(v, factor, a.cap);
      to = valid ? v : -INFINITY;
    }
  }
}

template <class Position>
__device__ __forceinline__ void add_logit_weights(float (&z)[128], const ForwardArguments& a,
                                                  const Position& at) {
#pragma unroll
  for (int i = 0; i < Position::kColumns; ++i) {
    const int vocab_id = at.first + Position::column(i);
    const float weight = at.whole || vocab_id < a.vocab ? a.logit_weights[vocab_id] : 0.0f;
#pragma unroll
    for (int h = 0; h < Position::kRows; ++h) {
      // Rounded by itself: the scaling before it must not be fused into the sum.
      float& logit = z[Position::reg(h, i)];
      logit = __fadd_rn(logit, weight);
    }
  }
}

template <class Position>
__device__ __forceinline__ void find_greatest(const float (&z)[128], const ForwardArguments& a,
                                              const Position& at, int h) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < Position::kColumns; ++i) top = fmaxf(top, z[Position::reg(h, i)]);
  at.put_greatest(a, quad_max(top), h);
}

__device__ __forceinline__ int vocab_id_at(const ForwardArguments& a, int position) {
  return a.vocab_ids == nullptr ? position
         : position < a.vocab   ? a.vocab_ids[position]
                                : 0x7fffffff;
}

template <class Position>
__device__ __forceinline__ void find_argmax(const float (&z)[128], const ForwardArguments& a,
                                            const Position& at, int h) {
  float top = -INFINITY;
  int index = at.first;
#pragma unroll
  for (int i = 0; i < Position::kColumns; ++i) {
    const float v = z[Position::reg(h, i)];
    const int position = at.first + Position::column(i);
    if (v > top ||
        (a.vocab_ids != nullptr && v == top && vocab_id_at(a, position) < vocab_id_at(a, index))) {
      top = v;
      index = position;
    }
  }
  put_argmax(top, vocab_id_at(a, index), a, at, h);
}

// Slope of the softcap at the capped logit v; `inverse` is 1 / cap.
template <bool kCapped>
__device__ __forceinline__ float slope(float v, float inverse) {
  return kCapped ? (1.0f - v * inverse) * (1.0f + v * inverse) : 1.0f;
}

// With kStore, replaces z by the exponentials times the slope of the softcap.
template <bool kStore, bool kCapped, class Position>
__device__ __forceinline__ void sum_general(float (&z)[128], const ForwardArguments& a,
                                            const Position& at, int h) {
  const float k = a.reference[at.token(h)];
  const float inverse = kCapped ? 1.0f / a.cap : 0.0f;
  float sum = 0.0f, entropy = 0.0f, weighted = 0.0f;
  float mass[Position::kHalves] = {};
#pragma unroll
  for (int i = 0; i < Position::kColumns; ++i) {
    const int reg = Position::reg(h, i);
    const float v = z[reg];
    const float bits = fmaf(v, kLog2EFloat, -k);
    const float e = exp2_fast(bits);
    sum += e;
    if (a.entropy != nullptr) entropy += e == 0.0f ? 0.0f : e * bits;  // a masked entry is 0 * -inf
    const int vocab_id = at.first + Position::column(i);
    if (a.weighted != nullptr && (at.whole || vocab_id < a.vocab))
      weighted += (a.logit_weights == nullptr ? 1.0f : a.logit_weights[vocab_id]) * v;
    if constexpr (kStore) z[reg] = e == 0.0f ? 0.0f : e * slope<kCapped>(v, inverse);
    if (a.masses != nullptr && e != 0.0f) mass[Position::half(i)] += e * slope<kCapped>(v, inverse);
  }
  if (a.masses != nullptr) at.put_masses(a, mass, h);
  at.put_sum(RowSum::kSum, a.sums, sum, h);
  if (a.entropy != nullptr) at.put_sum(RowSum::kEntropy, a.entropy, entropy, h);
  if (a.weighted != nullptr) at.put_sum(RowSum::kWeighted, a.weighted, weighted, h);
}

// Gradient of the raw logits, without the targets' own part.
template <bool kCapped, class Position>
__device__ __forceinline__ void gradient(float (&z)[128], const ForwardArguments& a,
                                         const Position& at, int h) {
  const RowCoefficients c = a.rows[at.token(h)];
  const float rest = exp2_fast(-c.lse_rest);  // p = rest 2^(z log2e - lse_log2)
  const float slope_of_bits = c.beta * static_cast<float>(kLn2);
  const float alpha = rest * fmaf(-slope_of_bits, c.lse_rest, c.alpha);
  const float beta = rest * slope_of_bits;
  const float inverse = kCapped ? 1.0f / a.cap : 0.0f;
  float factor = at.factor;
  if (!kCapped && at.normalizes) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Position::kColumns; ++i)
      sum += exp2_fast(fmaf(z[Position::reg(h, i)], kLog2EFloat, -c.lse_log2));
    const float by = normalize_sampled(rest * sum, a, at, h, c);
    if (c.alpha != 0.0f) factor *= by;
  }
#pragma unroll
  for (int i = 0; i < Position::kColumns; ++i) {
    const int reg = Position::reg(h, i);
    const int vocab_id = at.first + Position::column(i);
    const float v = z[reg];
    const float bits = fmaf(v, kLog2EFloat, -c.lse_log2);
    const float e = exp2_fast(bits);
    float dz = alpha * e;
    if (beta != 0.0f && e != 0.0f) dz = fmaf(beta * e, bits, dz);
    if (a.smooths && c.gamma != 0.0f)
      dz = fmaf(
          c.gamma,
          a.logit_weights == nullptr || vocab_id >= a.vocab ? 1.0f : a.logit_weights[vocab_id], dz);
    z[reg] = at.whole || vocab_id < a.vocab ? factor * dz * slope<kCapped>(v, inverse) : 0.0f;
  }
}

template <class Position>
__device__ __forceinline__ void plain_gradient(float (&z)[128], const ForwardArguments& a,
                                               const Position& at) {
  const float factor = rest_of_scale(z, a) * kLog2EFloat;
#pragma unroll
  for (int h = 0; h < Position::kRows; ++h) {
    const RowCoefficients c = a.rows[at.token(h)];
    const float rest = exp2_fast(-c.lse_rest);  // p = rest 2^(z log2e - lse_log2)
    float alpha = at.factor * rest * c.alpha;
    if (at.normalizes) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Position::kColumns; ++i) {
        const int reg = Position::reg(h, i);
        const bool valid = at.whole || at.first + Position::column(i) < a.vocab;
        sum += valid ? exp2_fast(fmaf(z[reg], factor, -c.lse_log2)) : 0.0f;
      }
      const float by = normalize_sampled(rest * sum, a, at, h, c);
      if (alpha != 0.0f) alpha *= by;
    }
#pragma unroll
    for (int i = 0; i < Position::kColumns; ++i) {
      const int reg = Position::reg(h, i);
      const bool valid = at.whole || at.first + Position::column(i) < a.vocab;
      z[reg] = valid ? alpha * exp2_fast(fmaf(z[reg], factor, -c.lse_log2)) : 0.0f;
    }
  }
}

template <ForwardMode kMode, bool kStore, bool kCapped, class Position>
__device__ __forceinline__ void finish_general(float (&z)[128], const ForwardArguments& a,
                                               const Position& at) {
  transform<kCapped>(z, a, at);
  if constexpr (kMode == ForwardMode::kLogits) {
    if (a.logit_weights != nullptr) add_logit_weights(z, a, at);
  }
#pragma unroll
  for (int h = 0; h < Position::kRows; ++h) {
    if constexpr (kMode == ForwardMode::kReference || kMode == ForwardMode::kLogits) {
      find_greatest(z, a, at, h);
    } else if constexpr (kMode == ForwardMode::kGradient) {
      gradient<kCapped>(z, a, at, h);
    } else {
      if (a.best != nullptr) find_argmax(z, a, at, h);
      sum_general<kStore, kCapped>(z, a, at, h);
    }
  }
}

// Move results to and from a.logits. Eight rows x 32 bytes are whole sectors of memory.
template <class Position>
__device__ __forceinline__ float* logits_at(const ForwardArguments& a, const Position& at, int h) {
  return a.logits + at.token(h) * a.vocab_tiles * kTileColumns + at.first;
}
template <class Position>
__device__ __forceinline__ void put_logits(const float (&z)[128], const ForwardArguments& a,
                                           const Position& at) {
#pragma unroll
  for (int h = 0; h < Position::kRows; ++h) {
    if (at.token(h) >= a.tokens) continue;
    float* const to = logits_at(a, at, h);
#pragma unroll
    for (int i = 0; i < Position::kColumns; i += 2)
      *reinterpret_cast<float2*>(to + Position::column(i)) =
          make_float2(z[Position::reg(h, i)], z[Position::reg(h, i + 1)]);
  }
}
template <class Position>
__device__ __forceinline__ void get_logits(float (&z)[128], const ForwardArguments& a,
                                           const Position& at) {
#pragma unroll
  for (int h = 0; h < Position::kRows; ++h) {
    const bool exists = at.token(h) < a.tokens;
    const float* const from = logits_at(a, at, h);
#pragma unroll
    for (int i = 0; i < Position::kColumns; i += 2) {
      const float2 two =
          exists ? *reinterpret_cast<const float2*>(from + Position::column(i)) : float2{};
      z[Position::reg(h, i)] = two.x;
      z[Position::reg(h, i + 1)] = two.y;
    }
  }
}

template <ForwardMode kMode, bool kStore, class Position>
__device__ __forceinline__ void finish_tile(float (&z)[128], const ForwardArguments& a,
                                            const Position& at) {
  if constexpr (kMode == ForwardMode::kLogits) put_logits(z, a, at);
  if constexpr (kMode == ForwardMode::kPlain || kMode == ForwardMode::kPlainEntropy ||
                kMode == ForwardMode::kPlainBest) {
    sum_plain<kMode>(z, a, at);
  } else if constexpr (kMode == ForwardMode::kPlainGradient) {
    plain_gradient(z, a, at);
  } else if (a.cap == 0.0f) {
    finish_general<kMode, kStore, false>(z, a, at);
  } else {
    finish_general<kMode, kStore, true>(z, a, at);
  }
}

// Brings the exponentials of a tile into the range of f16. A row is multiplied by its 2^lift. What
// it then has in 64 entries is divided by a power of two where the greatest is above 2^15, and the
// exponent noted in a.shifts.
template <class Position>
__device__ __forceinline__ void shift_rows(float (&z)[128], const ForwardArguments& a,
                                           const Position& at) {
  constexpr int kColumns = Position::kColumns / Position::kSegments;
  constexpr int kBias = 127, kMost = 15;
#pragma unroll
  for (int h = 0; h < Position::kRows; ++h) {
    const float lift = exp2_fast(a.lifts[at.token(h)]);
#pragma unroll
    for (int s = 0; s < Position::kSegments; ++s) {
      float most = 0.0f;
#pragma unroll
      for (int i = s * kColumns; i < (s + 1) * kColumns; ++i)
        most = fmaxf(most, z[Position::reg(h, i)]);
      most = quad_max(most) * lift;
      const int shift = max(0, static_cast<int>(__float_as_uint(most) >> 23) - kBias + 1 - kMost);
      if (threadIdx.x % 4 == 0) {
        const std::int64_t segment = at.token(h) * a.vocab_tiles * 4 + at.vocab_id * 4;
        a.shifts[segment + at.segment(s)] = static_cast<std::uint8_t>(shift);
      }
      const float factor = lift * __uint_as_float(static_cast<unsigned>(kBias - shift) << 23);
#pragma unroll
      for (int i = s * kColumns; i < (s + 1) * kColumns; ++i) z[Position::reg(h, i)] *= factor;
    }
  }
}

}  // namespace logitless::cuda

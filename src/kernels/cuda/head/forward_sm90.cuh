// Persistent forward kernel of the head on Hopper. The mainloop computes the logits of a tile of
// 128 tokens x 256 vocabulary entries in registers, and the epilogue reduces them there. Per token
// and tile it writes the partial results of log-sum-exp, entropy, weighted sum and argmax. For
// gradients it also writes exp(z) or the gradient of the logits in bf16. Logits never leave the SM.
//
// Exponentials are relative to a reference exponent of each token that is fixed beforehand. So the
// sums of all tiles add up directly, and no running maximum is needed. References come from the
// target logits. Where a sum leaves the range of fp32, a launch with kReference finds the greatest
// logit, and the tokens are recomputed.
#pragma once

#include "kernels/cuda/device/tiles_sm90.cuh"
#include "kernels/device/far.h"
#include "math/lse_state.h"

namespace logitless::cuda {

// kPlain: scale alone. kPlainEntropy: scale and entropy. kGeneral: bias, softcap, and all outputs
// beyond lse. kReference: the greatest logit of each token and tile, into `best`. kGradient: the
// gradient of the logits. kPlainGradient: the same with scale and cross entropy alone.
enum class ForwardMode { kPlain, kPlainEntropy, kGeneral, kReference, kGradient, kPlainGradient };

// Arguments of a launch. Arrays are [vocabulary tiles][padded tokens].
struct ForwardArguments {
  int vocab;
  int token_pairs;  // pairs of token tiles: ceil(tokens / 256)
  int first_pair;   // first pair of this launch
  int launch_pairs;
  int vocab_tiles;   // vocabulary tiles visited
  int steps;         // ceil(dim / 64)
  int group;         // pairs whose hidden states stay in L2
  int stored_tiles;  // vocabulary tiles with stored exp(z) or gradients
  std::int64_t padded_tokens;
  float scale;
  float cap;
  const float* bias;
  const float* logit_weights;
  const float* reference;  // [padded tokens], integral
  float* sums;             // sums of 2^(z log2e - reference)
  float* entropy;          // sums of x log2 x, x = 2^(z log2e - reference), or null
  float* weighted;         // sums of logit weight times z, or null
  float* best;             // greatest z, or null
  int* best_index;
  // [token_pairs + 1]: 0 skips the pair, 0 in the last skips all; null: none skipped
  const int* wanted;
  bool smooths;                 // kGradient adds gamma times the logit weights
  const RowCoefficients* rows;  // [padded tokens], for kGradient
  // [2 vocabulary tiles][padded tokens], far field: for each 128 entries, the sum of the
  // exponentials times the slope of the softcap; null: not wanted. With kGradient and
  // kPlainGradient: their estimates, indexed by `groups`, or null where masses are exact. For
  // sampled tiles see normalize_sampled.
  float* masses;
  const std::int32_t* groups;  // [vocabulary tiles]
  // Tile list of a block-sparse launch: far_entry(vocabulary tile, sampled, pair), entries
  // list_begin[0] to list_begin[vocab_tiles], vocabulary tiles from first_tile on. Null: all tiles.
  const std::uint32_t* list;
  const int* list_begin;
  int first_tile;
  float sampled;                  // factor of sampled tiles in kGradient and kPlainGradient
  const std::int32_t* vocab_ids;  // token ids by position, for argmax; null: the positions
};

inline constexpr float kLog2EFloat = static_cast<float>(kLog2E);

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh with a relative error of 1.2e-6, in a dozen instructions without a branch: 1 - 2 / (1 +
// e^2x), and a series for small x.
__device__ __forceinline__ float tanh_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + exp2_fast(x * (2.0f * kLog2EFloat))));
  const float s = x * x;
  const float series =
      fmaf(s, fmaf(s, fmaf(s, fmaf(s, 62.0f / 2835, -17.0f / 315), 2.0f / 15), -1.0f / 3), 1.0f);
  return fabsf(x) < 0.25f ? x * series : fmaf(-2.0f, r, 1.0f);
}

// 256 vocabulary entries for a pair of token tiles.
struct Tile {
  int pair;
  int vocab_id;  // vocabulary tile
  bool sampled;  // of the far field: sampled, not selected
};
// Maps a tile index of a launch to a tile. The order keeps a group of token tiles in L2 while the
// weights stream past.
__device__ __forceinline__ Tile tile_of(int index, const ForwardArguments& a) {
  if (a.list != nullptr) {
    const std::uint32_t entry = a.list[index];
    return {block_of_entry(entry), group_of_entry(entry) - a.first_tile, sampled_entry(entry)};
  }
  const int group_size = a.group * a.vocab_tiles;
  const int first = index / group_size * a.group;
  const int rows = min(a.group, a.launch_pairs - first);
  const int within = index % group_size;
  return {a.first_pair + first + within % rows, within / rows, false};
}

// Reductions over the four lanes that share an accumulator row.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

// A thread's part of a tile, see accumulator_row.
struct TilePosition {
  __device__ __forceinline__ TilePosition(const ForwardArguments& a, std::int64_t token,
                                          const Tile& tile)
      : row(token),
        vocab_id(tile.vocab_id),
        first(tile.vocab_id * kTileColumns + accumulator_column()),
        out(tile.vocab_id * a.padded_tokens + token),
        factor(tile.sampled ? a.sampled : 1.0f),
        normalizes(tile.sampled && a.masses != nullptr),
        writes(threadIdx.x % 4 == 0),
        whole((tile.vocab_id + 1) * kTileColumns <= a.vocab) {}
  std::int64_t row;  // token row for h = 0; 8 more for h = 1
  int vocab_id;      // vocabulary tile
  int first;         // vocabulary entry of register 0
  std::int64_t out;  // index in the arrays of partial results
  float factor;      // of gradients
  bool normalizes;   // gradients are normalised with the tile's exact mass
  bool writes;       // first of the four lanes that share a row
  bool whole;        // the tile is full, not clipped by vocab
};

// Writes the masses of a token in the two halves of a tile.
__device__ __forceinline__ void put_masses(float low, float high, const ForwardArguments& a,
                                           const TilePosition& at, int h) {
  low = quad_sum(low);
  high = quad_sum(high);
  if (!at.writes) return;
  const std::int64_t first = 2 * (at.out - at.row) + at.row + 8 * h;
  a.masses[first] = low;
  a.masses[first + a.padded_tokens] = high;
}

// Returns the factor of a token's gradients in a sampled tile where masses are estimates. The
// tile's exact mass, of which each lane holds `part`, replaces its estimate in the token's total.
// Overwrites the tile's masses with the estimate's error and the exact mass, relative to the total.
__device__ __forceinline__ float normalize_sampled(float part, const ForwardArguments& a,
                                                   const TilePosition& at, int h,
                                                   const RowCoefficients& c) {
  const float exact = quad_sum(part);
  float* const masses = a.masses + 2 * a.groups[at.vocab_id] * a.padded_tokens + at.row + 8 * h;
  const float sum = masses[0] + masses[a.padded_tokens];
  const float estimate = sum * exp2_fast(c.less_lse(a.reference[at.row + 8 * h]));
  __syncwarp();  // all four lanes have read
  if (at.writes) {
    masses[0] = exact - estimate;
    masses[a.padded_tokens] = exact;
  }
  const float total = fmaxf(1.0f + (exact - estimate), exact);
  return total > 0.0f ? 1.0f / total : isnan(total) ? total : 1.0f;
}

// Returns the factor from z to an exponent of 2. A scale that is not a power of two is applied to z
// first, which rounds all logits as the target's is: equal ones stay equal.
__device__ __forceinline__ float plain_factor(float (&z)[128], const ForwardArguments& a) {
  constexpr unsigned kMantissa = 0x7fffff;
  if ((__float_as_uint(a.scale) & kMantissa) == 0) return a.scale * kLog2EFloat;
#pragma unroll
  for (int i = 0; i < 128; ++i) z[i] *= a.scale;
  return kLog2EFloat;
}

// Replaces z by its exponentials; 0 past the vocabulary's end.
template <bool kEntropy>
__device__ __forceinline__ void sum_plain(float (&z)[128], const ForwardArguments& a,
                                          const TilePosition& at) {
  const float factor = plain_factor(z, a);
  const float none = copysignf(3e38f, -factor);  // its exponential is 0, and so is 0 times it
  const auto exists = [&](int reg) { return at.first + reg / 4 * 8 + reg % 2 < a.vocab; };
  if (!kEntropy && !at.whole) {  // inside the loop below it is slower, but spills less
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      if (!exists(i)) z[i] = none;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float k = a.reference[at.row + 8 * h];
    float sum[2] = {};  // 128 entries each
    float entropy = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int reg = i / 2 * 4 + 2 * h + i % 2;
      const float product = !kEntropy || at.whole || exists(reg) ? z[reg] : none;
      float bits = fmaf(product, factor, -k);
      if constexpr (kEntropy) bits = fmaxf(bits, -3e38f);  // so that 0 times it is 0
      const float e = exp2_fast(bits);
      sum[i / 32] += e;
      if constexpr (kEntropy) entropy = fmaf(e, bits, entropy);
      z[reg] = e;
    }
    if (a.masses != nullptr) put_masses(sum[0], sum[1], a, at, h);
    const float s = quad_sum(sum[0] + sum[1]);
    if (at.writes) a.sums[at.out + 8 * h] = s;
    if constexpr (kEntropy) {
      const float e = quad_sum(entropy);
      if (at.writes) a.entropy[at.out + 8 * h] = e;
    }
  }
}

// z = softcap(scale * (z + bias)); -inf past the vocabulary's end. kCapped is a template parameter,
// since functions of a capped logit are much longer.
template <bool kCapped>
__device__ __forceinline__ void transform(float (&z)[128], const ForwardArguments& a,
                                          const TilePosition& at) {
  const float factor = kCapped ? a.scale / a.cap : a.scale;
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int vocab_id = at.first + i / 4 * 8 + i % 2;
    const bool valid = at.whole || vocab_id < a.vocab;
    float v = z[i];
    if (a.bias != nullptr && valid) v += a.bias[vocab_id];
    v *= factor;
    if constexpr (kCapped) v = a.cap * tanh_fast(v);
    z[i] = valid ? v : -INFINITY;
  }
}

__device__ __forceinline__ void find_greatest(const float (&z)[128], const ForwardArguments& a,
                                              const TilePosition& at, int h) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 64; ++i) top = fmaxf(top, z[i / 2 * 4 + 2 * h + i % 2]);
  top = quad_max(top);
  if (at.writes) a.best[at.out + 8 * h] = top;
}

__device__ __forceinline__ int vocab_id_at(const ForwardArguments& a, int position) {
  return a.vocab_ids == nullptr ? position
         : position < a.vocab   ? a.vocab_ids[position]
                                : 0x7fffffff;
}

// The lowest token id wins ties.
__device__ __forceinline__ void find_argmax(const float (&z)[128], const ForwardArguments& a,
                                            const TilePosition& at, int h) {
  float top = -INFINITY;
  int index = at.first;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const float v = z[i / 2 * 4 + 2 * h + i % 2];
    const int position = at.first + i / 2 * 8 + i % 2;
    if (v > top ||
        (a.vocab_ids != nullptr && v == top && vocab_id_at(a, position) < vocab_id_at(a, index))) {
      top = v;
      index = position;
    }
  }
  index = vocab_id_at(a, index);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other = __shfl_xor_sync(~0u, top, step);
    const int other_index = __shfl_xor_sync(~0u, index, step);
    if (other > top || (other == top && other_index < index)) {
      top = other;
      index = other_index;
    }
  }
  if (at.writes) {
    a.best[at.out + 8 * h] = top;
    a.best_index[at.out + 8 * h] = index;
  }
}

// Slope of the softcap at the capped logit v; `inverse` is 1 / cap.
template <bool kCapped>
__device__ __forceinline__ float slope(float v, float inverse) {
  return kCapped ? (1.0f - v * inverse) * (1.0f + v * inverse) : 1.0f;
}

// With kStore, replaces z by the exponentials times the slope of the softcap.
template <bool kStore, bool kCapped>
__device__ __forceinline__ void sum_general(float (&z)[128], const ForwardArguments& a,
                                            const TilePosition& at, int h) {
  const float k = a.reference[at.row + 8 * h];
  const float inverse = kCapped ? 1.0f / a.cap : 0.0f;
  float sum = 0.0f, entropy = 0.0f, weighted = 0.0f;
  float mass[2] = {};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int reg = i / 2 * 4 + 2 * h + i % 2;
    const float v = z[reg];
    const float bits = fmaf(v, kLog2EFloat, -k);
    const float e = exp2_fast(bits);
    sum += e;
    if (a.entropy != nullptr) entropy += e == 0.0f ? 0.0f : e * bits;  // a masked entry is 0 * -inf
    const int vocab_id = at.first + i / 2 * 8 + i % 2;
    if (a.weighted != nullptr && (at.whole || vocab_id < a.vocab))
      weighted += (a.logit_weights == nullptr ? 1.0f : a.logit_weights[vocab_id]) * v;
    if constexpr (kStore) z[reg] = e == 0.0f ? 0.0f : e * slope<kCapped>(v, inverse);
    if (a.masses != nullptr && e != 0.0f) mass[i / 32] += e * slope<kCapped>(v, inverse);
  }
  if (a.masses != nullptr) put_masses(mass[0], mass[1], a, at, h);
  sum = quad_sum(sum);
  if (at.writes) a.sums[at.out + 8 * h] = sum;
  if (a.entropy != nullptr) {
    entropy = quad_sum(entropy);
    if (at.writes) a.entropy[at.out + 8 * h] = entropy;
  }
  if (a.weighted != nullptr) {
    weighted = quad_sum(weighted);
    if (at.writes) a.weighted[at.out + 8 * h] = weighted;
  }
}

// Gradient of the raw logits, without the targets' own part.
template <bool kCapped>
__device__ __forceinline__ void gradient(float (&z)[128], const ForwardArguments& a,
                                         const TilePosition& at, int h) {
  const RowCoefficients c = a.rows[at.row + 8 * h];
  const float rest = exp2_fast(-c.lse_rest);  // p = rest 2^(z log2e - lse_log2)
  const float slope_of_bits = c.beta * static_cast<float>(kLn2);
  const float alpha = rest * fmaf(-slope_of_bits, c.lse_rest, c.alpha);
  const float beta = rest * slope_of_bits;
  const float inverse = kCapped ? 1.0f / a.cap : 0.0f;
  float factor = at.factor;
  if (!kCapped && at.normalizes) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i)
      sum += exp2_fast(fmaf(z[i / 2 * 4 + 2 * h + i % 2], kLog2EFloat, -c.lse_log2));
    const float by = normalize_sampled(rest * sum, a, at, h, c);
    if (c.alpha != 0.0f) factor *= by;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int reg = i / 2 * 4 + 2 * h + i % 2;
    const int vocab_id = at.first + i / 2 * 8 + i % 2;
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

__device__ __forceinline__ void plain_gradient(float (&z)[128], const ForwardArguments& a,
                                               const TilePosition& at) {
  const float factor = plain_factor(z, a);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowCoefficients c = a.rows[at.row + 8 * h];
    const float rest = exp2_fast(-c.lse_rest);  // p = rest 2^(z log2e - lse_log2)
    float alpha = at.factor * rest * c.alpha;
    if (at.normalizes) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const int reg = i / 2 * 4 + 2 * h + i % 2;
        const bool valid = at.whole || at.first + i / 2 * 8 + i % 2 < a.vocab;
        sum += valid ? exp2_fast(fmaf(z[reg], factor, -c.lse_log2)) : 0.0f;
      }
      const float by = normalize_sampled(rest * sum, a, at, h, c);
      if (alpha != 0.0f) alpha *= by;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int reg = i / 2 * 4 + 2 * h + i % 2;
      const bool valid = at.whole || at.first + i / 2 * 8 + i % 2 < a.vocab;
      z[reg] = valid ? alpha * exp2_fast(fmaf(z[reg], factor, -c.lse_log2)) : 0.0f;
    }
  }
}

template <ForwardMode kMode, bool kStore, bool kCapped>
__device__ __forceinline__ void finish_general(float (&z)[128], const ForwardArguments& a,
                                               const TilePosition& at) {
  transform<kCapped>(z, a, at);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (kMode == ForwardMode::kReference) {
      find_greatest(z, a, at, h);
    } else if constexpr (kMode == ForwardMode::kGradient) {
      gradient<kCapped>(z, a, at, h);
    } else {
      if (a.best != nullptr) find_argmax(z, a, at, h);
      sum_general<kStore, kCapped>(z, a, at, h);
    }
  }
}

template <ForwardMode kMode, bool kStore>
__device__ __forceinline__ void finish_tile(float (&z)[128], const ForwardArguments& a,
                                            const TilePosition& at) {
  if constexpr (kMode == ForwardMode::kPlain || kMode == ForwardMode::kPlainEntropy) {
    sum_plain<kMode == ForwardMode::kPlainEntropy>(z, a, at);
  } else if constexpr (kMode == ForwardMode::kPlainGradient) {
    plain_gradient(z, a, at);
  } else if (a.cap == 0.0f) {
    finish_general<kMode, kStore, false>(z, a, at);
  } else {
    finish_general<kMode, kStore, true>(z, a, at);
  }
}

template <ForwardMode kMode, bool kStore>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kTileThreads, 1)
    forward_tiles(const __grid_constant__ CUtensorMap hidden,
                  const __grid_constant__ CUtensorMap weight,
                  const __grid_constant__ BlockMaps block, const ForwardArguments a) {
  if (a.wanted != nullptr && a.wanted[a.token_pairs] == 0) return;
  extern __shared__ unsigned char shared_memory[];
  const TileMemory memory(shared_memory);
  memory.init_barriers();
  const int rank = cluster_rank();
  const int cluster = blockIdx.x / kClusterCtas;
  const int clusters = gridDim.x / kClusterCtas;
  const int listed = a.list == nullptr ? 0 : a.list_begin[0];
  const int tiles =
      a.list == nullptr ? a.launch_pairs * a.vocab_tiles : a.list_begin[a.vocab_tiles] - listed;
  StageCursor at;
  if (threadIdx.x < 128) {
    registers_shrink<40>();
    if (threadIdx.x == 0) {
      const std::uint64_t keep = keep_policy();
      const std::uint64_t pass = pass_policy();
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = tile_of(t + listed, a);
        if (a.wanted != nullptr && a.wanted[tile.pair] == 0) continue;
        const int row = (tile.pair * kClusterCtas + rank) * kTileRows;
        const int half = tile.vocab_id * kTileColumns + rank * (kTileColumns / 2);
        for (int k = 0; k < a.steps; ++k) {
          std::uint64_t* const full = memory.full + at.stage;
          barrier_wait(memory.empty + at.stage, at.phase ^ 1);
          barrier_expect(full, kStageBytes);
          tma_load(memory.rows + at.stage * kRowBytes, &hidden, full, k * kStep, row, keep);
          tma_load_multicast(memory.columns + at.stage * kColumnBytes + rank * (kColumnBytes / 2),
                             &weight, full, k * kStep, half, (1 << kClusterCtas) - 1, pass);
          at.advance();
        }
      }
    }
  } else {
    registers_grow<232>();
    const int consumer = threadIdx.x / 128 - 1;
    const int lane = threadIdx.x % 32;
    TileWriter writer(memory);
    float z[128];
    for (int t = cluster; t < tiles; t += clusters) {
      const Tile tile = tile_of(t + listed, a);
      if (a.wanted != nullptr && a.wanted[tile.pair] == 0) continue;
      int previous = -1;
      for (int k = 0; k < a.steps; ++k) {
        barrier_wait(memory.full + at.stage, at.phase);
        const unsigned char* x = memory.rows + at.stage * kRowBytes + consumer * (kRowBytes / 2);
        const unsigned char* w = memory.columns + at.stage * kColumnBytes;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kStep / 16; ++j) {
          wgmma_m64n256k16<0, 0>(z, wgmma_descriptor(x + j * 32, 16, 1024),
                                 wgmma_descriptor(w + j * 32, 16, 1024), k > 0 || j > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the GEMM step before is done with its stage
        if (previous >= 0 && lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
        previous = at.stage;
        at.advance();
      }
      wgmma_wait<0>();
      if (lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
      const int row = (tile.pair * kClusterCtas + rank) * kTileRows;
      finish_tile<kMode, kStore>(z, a, TilePosition(a, row + accumulator_row(), tile));
      if constexpr (kStore) {
        if (tile.vocab_id < a.stored_tiles)
          writer.put_bf16(z, &block, tile.vocab_id * kTileColumns, row + consumer * 64);
      }
    }
    if constexpr (kStore) writer.drain();
  }
  cluster_sync();  // no CTA exits while the other may still signal it
}

}  // namespace logitless::cuda

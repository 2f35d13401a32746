// The forward pass over tiles of 128 tokens x 256 words: logits in registers, and per token and
// tile what the log-sum-exp, the entropy, the weighted sum and the argmax need of them. No logit
// leaves the multiprocessor.
//
// Persistent clusters of two CTAs. Each CTA: one warp of loads (tensor memory accelerator, 4 stages
// of 64 columns) and two warpgroups of products, 64 tokens x 256 words of fp32 accumulators each;
// while one reduces its logits, the other keeps the tensor cores busy. The two CTAs share the
// weights of a tile, each loading half for both.
//
// Exponentials are taken against a reference exponent of each token that is fixed before: with it
// the sums of all tiles add up as they are, and no maximum is sought here. References come from the
// same pass over one tile (kReference), or over all of them where a sum overflowed.
#pragma once

#include "kernels/cuda/device/sm90.cuh"

namespace logitless::cuda {

inline constexpr int kTokenTile = 128;
inline constexpr int kWordTile = 256;
inline constexpr int kDimStep = 64;
inline constexpr int kStages = 4;
inline constexpr int kClusterCtas = 2;
inline constexpr int kTileGroup = 8;  // pairs of token tiles whose hidden states stay in L2
inline constexpr int kHiddenBytes = kTokenTile * kDimStep * 2;
inline constexpr int kWeightBytes = kWordTile * kDimStep * 2;
inline constexpr int kForwardThreads = 384;
// Stages, their barriers, and room to align to the swizzle's 1024 bytes.
inline constexpr int kForwardShared =
    kStages * (kHiddenBytes + kWeightBytes) + 2 * kStages * 8 + 1024;

// kPlain: scale alone. kGeneral: bias, softcap, and the outputs beyond lse. kReference: the
// greatest logit of each token and tile, into `best`.
enum class ForwardMode { kPlain, kGeneral, kReference };

// Arrays [word tiles][padded tokens].
struct ForwardArguments {
  int vocab;
  int token_pairs;  // of tiles: ceil(tokens / 256)
  int word_tiles;   // visited
  int steps;        // ceil(dim / 64)
  std::int64_t padded_tokens;
  float scale;
  float cap;
  const float* bias;
  const float* omega;
  const float* reference;  // [padded tokens], integral
  float* sums;             // of 2^(z log2e - reference)
  float* entropy;          // of 2^(z log2e - reference) z, or null
  float* weighted;         // of omega z, or null
  float* best;             // greatest z, or null
  int* best_index;
  const int* wanted;  // [token_pairs + 1]: 0 skips the pair, 0 in the last all; null: none skipped
};

inline constexpr float kLog2EFloat = 1.4426950408889634f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Tiles in an order that keeps a group of token tiles in L2 while the weights stream past.
__device__ __forceinline__ void tile_of(int index, const ForwardArguments& a, int& pair,
                                        int& word) {
  const int group_size = kTileGroup * a.word_tiles;
  const int first = index / group_size * kTileGroup;
  const int rows = min(kTileGroup, a.token_pairs - first);
  const int within = index % group_size;
  pair = first + within % rows;
  word = within / rows;
}

// Over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

// A thread's share of the accumulators of one tile. Register 4 i + 2 h + j: row lane / 4 + 8 h of
// its warp's 16, column 8 i + 2 (lane % 4) + j of the tile.
struct TilePlace {
  __device__ __forceinline__ TilePlace(const ForwardArguments& a, std::int64_t token, int word_tile)
      : row(token),
        first(word_tile * kWordTile + threadIdx.x % 4 * 2),
        out(word_tile * a.padded_tokens + token),
        writes(threadIdx.x % 4 == 0),
        whole((word_tile + 1) * kWordTile <= a.vocab) {}
  std::int64_t row;  // of the thread's upper half; 8 more for the lower
  int first;         // word of register 0
  std::int64_t out;  // place in the arrays of partial results
  bool writes;       // one lane of the four that share a row
  bool whole;        // all words of the tile exist
};

__device__ __forceinline__ void sum_plain(const float (&z)[128], const ForwardArguments& a,
                                          const TilePlace& at) {
  const float factor = a.scale * kLog2EFloat;
  const float k[2] = {a.reference[at.row], a.reference[at.row + 8]};
  float sum[2][2] = {};
  if (at.whole) {
#pragma unroll
    for (int i = 0; i < 128; ++i)
      sum[i / 2 % 2][i % 2] += exp2_fast(fmaf(z[i], factor, -k[i / 2 % 2]));
  } else {
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      if (at.first + i / 4 * 8 + i % 2 < a.vocab)
        sum[i / 2 % 2][i % 2] += exp2_fast(fmaf(z[i], factor, -k[i / 2 % 2]));
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float s = quad_sum(sum[h][0] + sum[h][1]);
    if (at.writes) a.sums[at.out + 8 * h] = s;
  }
}

// z = softcap(scale * (z + bias)); -inf past the last word.
__device__ __forceinline__ void transform(float (&z)[128], const ForwardArguments& a,
                                          const TilePlace& at) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int word = at.first + i / 4 * 8 + i % 2;
    const bool valid = at.whole || word < a.vocab;
    float v = z[i];
    if (a.bias != nullptr && valid) v += a.bias[word];
    v *= a.scale;
    if (a.cap != 0.0f) v = a.cap * tanhf(v / a.cap);
    z[i] = valid ? v : -INFINITY;
  }
}

__device__ __forceinline__ void find_greatest(const float (&z)[128], const ForwardArguments& a,
                                              const TilePlace& at, int h) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 64; ++i) top = fmaxf(top, z[i / 2 * 4 + 2 * h + i % 2]);
  top = quad_max(top);
  if (at.writes) a.best[at.out + 8 * h] = top;
}

// The lowest word among equals.
__device__ __forceinline__ void find_argmax(const float (&z)[128], const ForwardArguments& a,
                                            const TilePlace& at, int h) {
  float top = -INFINITY;
  int index = at.first;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const float v = z[i / 2 * 4 + 2 * h + i % 2];
    if (v > top) {
      top = v;
      index = at.first + i / 2 * 8 + i % 2;
    }
  }
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

__device__ __forceinline__ void sum_general(const float (&z)[128], const ForwardArguments& a,
                                            const TilePlace& at, int h) {
  const float k = a.reference[at.row + 8 * h];
  float sum = 0.0f, entropy = 0.0f, weighted = 0.0f;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const float v = z[i / 2 * 4 + 2 * h + i % 2];
    const float e = exp2_fast(fmaf(v, kLog2EFloat, -k));
    sum += e;
    if (a.entropy != nullptr) entropy += e == 0.0f ? 0.0f : e * v;  // a masked word is 0 * -inf
    const int word = at.first + i / 2 * 8 + i % 2;
    if (a.weighted != nullptr && (at.whole || word < a.vocab))
      weighted += (a.omega == nullptr ? 1.0f : a.omega[word]) * v;
  }
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

template <ForwardMode kMode>
__device__ __forceinline__ void finish_tile(float (&z)[128], const ForwardArguments& a,
                                            const TilePlace& at) {
  if constexpr (kMode == ForwardMode::kPlain) {
    sum_plain(z, a, at);
  } else {
    transform(z, a, at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kMode == ForwardMode::kReference) {
        find_greatest(z, a, at, h);
      } else {
        sum_general(z, a, at, h);
        if (a.best != nullptr) find_argmax(z, a, at, h);
      }
    }
  }
}

template <ForwardMode kMode>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kForwardThreads, 1)
    forward_tiles(const __grid_constant__ CUtensorMap hidden,
                  const __grid_constant__ CUtensorMap weight, const ForwardArguments a) {
  if (a.wanted != nullptr && a.wanted[a.token_pairs] == 0) return;
  extern __shared__ unsigned char shared_memory[];
  auto* stages = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<std::uintptr_t>(shared_memory) + 1023) & ~std::uintptr_t{1023});
  unsigned char* const weights = stages + kStages * kHiddenBytes;
  auto* const full = reinterpret_cast<std::uint64_t*>(weights + kStages * kWeightBytes);
  std::uint64_t* const empty = full + kStages;

  const int rank = cluster_rank();
  const int cluster = blockIdx.x / kClusterCtas;
  const int clusters = gridDim.x / kClusterCtas;
  const int tiles = a.token_pairs * a.word_tiles;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, 8 * kClusterCtas);  // the product warps of both CTAs
    }
    barrier_init_fence();
  }
  cluster_sync();

  int stage = 0;
  std::uint32_t phase = 0;
  const auto advance = [&] {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  };
  if (threadIdx.x < 128) {
    registers_shrink<40>();
    if (threadIdx.x == 0) {
      for (int t = cluster; t < tiles; t += clusters) {
        int pair, word;
        tile_of(t, a, pair, word);
        if (a.wanted != nullptr && a.wanted[pair] == 0) continue;
        const int row = (pair * kClusterCtas + rank) * kTokenTile;
        const int half = word * kWordTile + rank * (kWordTile / 2);
        for (int k = 0; k < a.steps; ++k) {
          barrier_wait(empty + stage, phase ^ 1);
          barrier_expect(full + stage, kHiddenBytes + kWeightBytes);
          tma_load(stages + stage * kHiddenBytes, &hidden, full + stage, k * kDimStep, row);
          tma_load_multicast(weights + stage * kWeightBytes + rank * (kWeightBytes / 2), &weight,
                             full + stage, k * kDimStep, half, (1 << kClusterCtas) - 1);
          advance();
        }
      }
    }
  } else {
    registers_grow<232>();
    const int consumer = threadIdx.x / 128 - 1;
    const int lane = threadIdx.x % 32;
    float z[128];
    for (int t = cluster; t < tiles; t += clusters) {
      int pair, word;
      tile_of(t, a, pair, word);
      if (a.wanted != nullptr && a.wanted[pair] == 0) continue;
      int previous = -1;
      for (int k = 0; k < a.steps; ++k) {
        barrier_wait(full + stage, phase);
        const unsigned char* x = stages + stage * kHiddenBytes + consumer * (kHiddenBytes / 2);
        const unsigned char* w = weights + stage * kWeightBytes;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kDimStep / 16; ++j) {
          wgmma_m64n256k16<0, 0>(z, wgmma_descriptor(x + j * 32, 16, 1024),
                                 wgmma_descriptor(w + j * 32, 16, 1024), k > 0 || j > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the products of the step before are done with its stage
        if (previous >= 0 && lane < kClusterCtas) barrier_arrive_at(empty + previous, lane);
        previous = stage;
        advance();
      }
      wgmma_wait<0>();
      if (lane < kClusterCtas) barrier_arrive_at(empty + previous, lane);
      const std::int64_t row = (pair * kClusterCtas + rank) * kTokenTile + consumer * 64 +
                               threadIdx.x / 32 % 4 * 16 + lane / 4;
      finish_tile<kMode>(z, a, TilePlace(a, row, word));
    }
  }
  cluster_sync();  // no CTA leaves while the other may still signal it
}

}  // namespace logitless::cuda

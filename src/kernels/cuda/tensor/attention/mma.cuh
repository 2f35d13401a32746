// Attention of bf16 and f16 by mma.sync: compute capability 8.0 or later, dim <= kDim: 64, 128 or
// 256.
//
// A CTA of four warps owns rows: queries in the forward and for d_q, keys for d_k and d_v. A warp
// has 16 of them, or twice 16 where registers allow it: what it then reads of the other operand
// serves both. That operand streams through shared memory in tiles; while one is multiplied, the
// next is copied. Scores stay in registers, where the accumulators of one GEMM are the left operand
// of the next. The owner's sums follow the order of the tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/fast_math.cuh"
#include "kernels/cuda/device/mma_sm80.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/tensor/attention/arguments.cuh"

namespace logitless::cuda {

inline constexpr int kMmaWarps = 4;
inline constexpr int kMmaThreads = 32 * kMmaWarps;
inline constexpr float kAttentionLog2E = 1.4426950408889634f;
inline constexpr float kAttentionLn2 = 0.6931471805599453f;

// Elements from row to row in shared memory: padded by 16 bytes, so that eight rows at the same
// column are in different banks.
template <int kDim>
inline constexpr int kMmaPitch = kDim + 8;
// Sixteens of rows that a warp owns, and rows of a streamed tile, limited by registers and by 99
// KiB of shared memory.
template <int kSixteens, int kPassingRows>
struct MmaTiles {
  static constexpr int kParts = kSixteens;
  static constexpr int kTile = kPassingRows;
  static constexpr int kWarpRows = 16 * kSixteens;
  static constexpr int kOwned = kMmaWarps * kWarpRows;
};
template <int kDim>
using ForwardTiles = MmaTiles<kDim <= 128 ? 2 : 1, kDim <= 64 ? 64 : 32>;
template <int kDim>
using QueryTiles =  // of d_q
    MmaTiles<kDim <= 64 ? 2 : 1, kDim <= 64    ? 64
                                 : kDim <= 128 ? 32
                                               : 16>;
template <int kDim>
using KeyTiles = MmaTiles<kDim <= 64 ? 2 : 1, kDim <= 128 ? 32 : 16>;  // of d_k and d_v
// Columns of d_k and d_v of a CTA. Where there are more, each CTA computes the scores again.
template <int kDim>
inline constexpr int kKeyColumns = kDim <= 128 ? kDim : 128;
// References and deltas of a tile's queries are in shared memory, where there is some left.
template <int kDim>
inline constexpr bool kShareNumbers = kDim <= 128;

// Bytes of shared memory: two stages of two streamed tiles beside `operands` owned ones, and
// `numbers` floats for each streamed row.
template <typename Tiles, int kDim>
constexpr int mma_shared(int operands, int numbers) {
  return (operands * Tiles::kOwned + 4 * Tiles::kTile) * kMmaPitch<kDim> * 2 +
         2 * numbers * Tiles::kTile * 4;
}
template <int kDim>
inline constexpr int kForwardMmaShared = mma_shared<ForwardTiles<kDim>, kDim>(1, 0);
template <int kDim>
inline constexpr int kQueryMmaShared = mma_shared<QueryTiles<kDim>, kDim>(2, 0);
template <int kDim>
inline constexpr int kKeyMmaShared = mma_shared<KeyTiles<kDim>, kDim>(2,
                                                                      kShareNumbers<kDim> ? 2 : 0);

// Loads rows [first, first + kRows) of a head into shared memory; 0 past its last row and column.
template <int kRows, int kDim, typename T>
__device__ __forceinline__ void load_rows(T* to, const T* head, const AttentionRows& rows,
                                          int first, int count, int dim) {
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kMmaThreads; ++i) {
    const int at = i * kMmaThreads + static_cast<int>(threadIdx.x);
    const int row = first + at / kChunks;
    const int column = at % kChunks * 8;
    T* const place = to + at / kChunks * kMmaPitch<kDim> + column;
    const T* const from = head + row * rows.stride_t + column;
    if (rows.aligned) {
      const bool there = row < count && column < dim;
      copy_async(place, there ? from : head, there ? 16 : 0);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        place[e] = row < count && column + e < dim ? from[e] : rounded<T>(0.0f);
    }
  }
}

// z [parts][16][8 kBlocks] += a . b^T; a: the warp's rows.
template <int kDim, int kParts, int kBlocks, typename T>
__device__ __forceinline__ void multiply_rows(float (&z)[kParts][kBlocks][4], const T* a,
                                              const T* b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    std::uint32_t left[kParts][4];
#pragma unroll
    for (int m = 0; m < kParts; ++m)
      load_matrices<false>(left[m],
                           a + (m * 16 + lane % 16) * kMmaPitch<kDim> + step * 16 + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      std::uint32_t right[4];
      load_matrices<false>(right, b + (n * 8 + lane / 16 * 8 + lane % 8) * kMmaPitch<kDim> +
                                      step * 16 + lane / 8 % 2 * 8);
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        mma<T>(z[m][n], left[m], right[0], right[1]);
        mma<T>(z[m][n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// sum [parts][16][8 kColumns] += z [parts][16][8 kBlocks] . b [8 kBlocks][8 kColumns], z rounded.
template <int kDim, int kParts, int kBlocks, int kColumns, typename T>
__device__ __forceinline__ void multiply_scores(float (&sum)[kParts][kColumns][4],
                                                const float (&z)[kParts][kBlocks][4], const T* b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kBlocks / 2; ++step) {
    std::uint32_t left[kParts][4];
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pair)[4] = z[m][2 * step + i / 2];
        left[m][i] = pair_of<T>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      std::uint32_t right[4];
      load_matrices<true>(right,
                          b + (step * 16 + lane % 16) * kMmaPitch<kDim> + n * 8 + lane / 16 * 8);
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        mma<T>(sum[m][n], left[m], right[0], right[1]);
        mma<T>(sum[m][n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// Stores the thread's part of 16 rows from `row` on, times factor[upper, lower half].
template <int kDim, typename T>
__device__ __forceinline__ void store_rows(const float (&sum)[kDim / 8][4],
                                           const float (&factor)[2], T* head,
                                           const AttentionRows& rows, int row, int count, int dim) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * h;
    if (r >= count) continue;
    T* const to = head + r * rows.stride_t;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = n * 8 + static_cast<int>(threadIdx.x % 4) * 2;
      const float low = sum[n][2 * h] * factor[h], high = sum[n][2 * h + 1] * factor[h];
      if (rows.aligned) {
        if (column < dim) *reinterpret_cast<std::uint32_t*>(to + column) = pair_of<T>(low, high);
      } else {
        if (column < dim) to[column] = rounded<T>(low);
        if (column + 1 < dim) to[column + 1] = rounded<T>(high);
      }
    }
  }
}

// Rows and columns of a thread's scores [parts][blocks][4], relative to its first row of the part
// and to the tile.
__device__ __forceinline__ int score_row(int j) { return j / 2 * 8; }
__device__ __forceinline__ int score_column(int n, int j) {
  return n * 8 + static_cast<int>(threadIdx.x % 4) * 2 + j % 2;
}
// f(score, part, block, j) for each of them.
template <int kParts, int kBlocks, typename F>
__device__ __forceinline__ void each_score(float (&z)[kParts][kBlocks][4], const F& f) {
#pragma unroll
  for (int m = 0; m < kParts; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) f(z[m][n][j], m, n, j);
    }
  }
}

// Online softmax of a thread's two rows: probabilities relative to 2^(factor * top).
struct RunningSoftmax {
  float top[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};  // sums of the thread's columns

  // Replaces scores z, -inf where masked, by 2^(factor * (z - top)); alpha: what rescales the sums
  // so far. factor > 0.
  template <int kBlocks>
  __device__ __forceinline__ void add(float (&z)[kBlocks][4], float factor, float (&alpha)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = top[h];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) now = fmaxf(now, fmaxf(z[n][2 * h], z[n][2 * h + 1]));
      now = quad_max(now);
      const float base = now == -INFINITY ? 0.0f : now * factor;
      alpha[h] = exp2_fast(fmaf(top[h], factor, -base));
      float part = 0.0f;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int j = 2 * h; j < 2 * h + 2; ++j)
          part += z[n][j] = exp2_fast(fmaf(z[n][j], factor, -base));
      }
      sum[h] = fmaf(sum[h], alpha[h], part);
      top[h] = now;
    }
  }
};

// CTA order: the last block of queries, which sees most keys, of all heads first.
template <typename T, int kDim>
__global__ void __launch_bounds__(kMmaThreads) forward_mma(const AttentionArguments a) {
  using Tiles = ForwardTiles<kDim>;
  constexpr int kTile = Tiles::kTile, kParts = Tiles::kParts;
  constexpr int kTileSize = kTile * kMmaPitch<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q = reinterpret_cast<T*>(shared);
  T* const tiles = q + Tiles::kOwned * kMmaPitch<kDim>;  // [2 stages][k, v]
  const int all_heads = a.batch * a.heads;
  const int head = static_cast<int>(blockIdx.x) % all_heads;
  const int b = head / a.heads, h = head % a.heads, kv = h / (a.heads / a.kv_heads);
  const int blocks = (a.queries + Tiles::kOwned - 1) / Tiles::kOwned;
  const int first = (blocks - 1 - static_cast<int>(blockIdx.x) / all_heads) * Tiles::kOwned;
  const int keys = a.keys_before(min(first + Tiles::kOwned, a.queries));

  const auto load = [&](int s) {
    T* const stage = tiles + s / kTile % 2 * 2 * kTileSize;
    load_rows<kTile, kDim>(stage, a.k.head<const T>(b, kv), a.k, s, a.keys, a.dim);
    load_rows<kTile, kDim>(stage + kTileSize, a.v.head<const T>(b, kv), a.v, s, a.keys, a.dim);
  };
  load_rows<Tiles::kOwned, kDim>(q, a.q.head<const T>(b, h), a.q, first, a.queries, a.dim);
  if (keys > 0) load(0);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tiles::kWarpRows;
  const int row = first + warp_row + static_cast<int>(threadIdx.x % 32) / 4;
  const float log2_scale = a.scale * kAttentionLog2E;
  float sum[kParts][kDim / 8][4] = {};
  RunningSoftmax softmax[kParts];
  for (int s = 0; s < keys; s += kTile) {
    copies_wait();
    __syncthreads();
    if (s + kTile < keys) load(s + kTile);
    const T* const k = tiles + s / kTile % 2 * 2 * kTileSize;
    float z[kParts][kTile / 8][4] = {};
    multiply_rows<kDim>(z, q + warp_row * kMmaPitch<kDim>, k);
    if (!a.sees(first, s + kTile - 1)) {
      each_score(z, [&](float& score, int m, int n, int j) {
        if (!a.sees(row + m * 16 + score_row(j), s + score_column(n, j))) score = -INFINITY;
      });
    }
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      float alpha[2];
      softmax[m].add(z[m], log2_scale, alpha);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[m][n][j] *= alpha[j / 2];
      }
    }
    multiply_scores<kDim>(sum, z, k + kTileSize);
  }
  copies_wait();

#pragma unroll
  for (int m = 0; m < kParts; ++m) {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = quad_sum(softmax[m].sum[i]);
      inverse[i] = total == 0.0f ? 0.0f : 1.0f / total;
      const int r = row + m * 16 + 8 * i;
      if (threadIdx.x % 4 == 0 && r < a.queries) {
        a.lse[static_cast<std::int64_t>(head) * a.queries + r] =
            total == 0.0f ? -INFINITY
                          : fmaf(softmax[m].top[i], log2_scale, log2f(total)) * kAttentionLn2;
      }
    }
    store_rows<kDim>(sum[m], inverse, a.out.head<T>(b, h), a.out, first + warp_row + m * 16,
                     a.queries, a.dim);
  }
}

// Log2 reference of a query's probabilities: +inf, which gives probabilities of 0, for a row that
// does not exist or sees no key.
__device__ __forceinline__ float reference_of(const AttentionArguments& a, std::int64_t head,
                                              int query) {
  if (query >= a.queries) return INFINITY;
  const float lse = a.lse[head * a.queries + query];
  return lse == -INFINITY ? INFINITY : lse * kAttentionLog2E;
}
__device__ __forceinline__ float delta_of(const AttentionArguments& a, std::int64_t head,
                                          int query) {
  return query < a.queries ? a.delta[head * a.queries + query] : 0.0f;
}

// d_k and d_v of keys of a kv head: over the heads of its group and the queries that see them.
template <typename T, int kDim>
__global__ void __launch_bounds__(kMmaThreads) key_gradients_mma(const AttentionArguments a) {
  using Tiles = KeyTiles<kDim>;
  constexpr int kTile = Tiles::kTile, kParts = Tiles::kParts;
  constexpr int kTileSize = kTile * kMmaPitch<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const k = reinterpret_cast<T*>(shared);
  T* const v = k + Tiles::kOwned * kMmaPitch<kDim>;
  T* const tiles = v + Tiles::kOwned * kMmaPitch<kDim>;                   // [2 stages][q, d_out]
  auto* const numbers = reinterpret_cast<float*>(tiles + 4 * kTileSize);  // [2][reference, delta]
  constexpr int kColumns = kKeyColumns<kDim>;
  const int first_column = static_cast<int>(blockIdx.x) % (kDim / kColumns) * kColumns;
  const int block = static_cast<int>(blockIdx.x) / (kDim / kColumns);
  const int all_heads = a.batch * a.kv_heads;
  const int b = block % all_heads / a.kv_heads, kv = block % a.kv_heads;
  const int first = block / all_heads * Tiles::kOwned;
  const int group = a.heads / a.kv_heads;
  const int first_tile = a.first_query(first) / kTile;
  const int tiles_of_head = max(0, (a.queries + kTile - 1) / kTile - first_tile);
  const int count = tiles_of_head * group;

  const auto load = [&](int i) {
    const int h = kv * group + i / tiles_of_head;
    const int query = (first_tile + i % tiles_of_head) * kTile;
    T* const stage = tiles + i % 2 * 2 * kTileSize;
    load_rows<kTile, kDim>(stage, a.q.head<const T>(b, h), a.q, query, a.queries, a.dim);
    load_rows<kTile, kDim>(stage + kTileSize, a.d_out.head<const T>(b, h), a.d_out, query,
                           a.queries, a.dim);
    const std::int64_t head = static_cast<std::int64_t>(b) * a.heads + h;
    float* const n = numbers + i % 2 * 2 * kTile;
    const int at = static_cast<int>(threadIdx.x);
    if (kShareNumbers<kDim> && at < kTile) {
      n[at] = reference_of(a, head, query + at);
      n[kTile + at] = delta_of(a, head, query + at);
    }
  };
  load_rows<Tiles::kOwned, kDim>(k, a.k.head<const T>(b, kv), a.k, first, a.keys, a.dim);
  load_rows<Tiles::kOwned, kDim>(v, a.v.head<const T>(b, kv), a.v, first, a.keys, a.dim);
  if (count > 0) load(0);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tiles::kWarpRows;
  const int row = first + warp_row + static_cast<int>(threadIdx.x % 32) / 4;
  const float log2_scale = a.scale * kAttentionLog2E;
  float d_k[kParts][kColumns / 8][4] = {}, d_v[kParts][kColumns / 8][4] = {};
  for (int i = 0; i < count; ++i) {
    copies_wait();
    __syncthreads();
    if (i + 1 < count) load(i + 1);
    const T* const q = tiles + i % 2 * 2 * kTileSize;
    const T* const d_out = q + kTileSize;
    const float* const shared_numbers = numbers + i % 2 * 2 * kTile;
    const int query = (first_tile + i % tiles_of_head) * kTile;
    const std::int64_t head =
        static_cast<std::int64_t>(b) * a.heads + kv * group + i / tiles_of_head;
    const auto reference = [&](int column) {
      return kShareNumbers<kDim> ? shared_numbers[column] : reference_of(a, head, query + column);
    };
    const auto delta = [&](int column) {
      return kShareNumbers<kDim> ? shared_numbers[kTile + column]
                                 : delta_of(a, head, query + column);
    };
    float p[kParts][kTile / 8][4] = {};
    multiply_rows<kDim>(p, k + warp_row * kMmaPitch<kDim>, q);
    if (!a.sees(query, min(first + Tiles::kOwned, a.keys) - 1)) {
      each_score(p, [&](float& score, int m, int n, int j) {
        if (!a.sees(query + score_column(n, j), row + m * 16 + score_row(j))) score = -INFINITY;
      });
    }
    each_score(p, [&](float& score, int, int n, int j) {
      score = exp2_fast(fmaf(score, log2_scale, -reference(score_column(n, j))));
    });
    multiply_scores<kDim>(d_v, p, d_out + first_column);
    float d[kParts][kTile / 8][4] = {};
    multiply_rows<kDim>(d, v + warp_row * kMmaPitch<kDim>, d_out);
    each_score(d, [&](float& score, int m, int n, int j) {
      score = p[m][n][j] * (score - delta(score_column(n, j)));
    });
    multiply_scores<kDim>(d_k, d, q + first_column);
  }
  copies_wait();
  const float scales[2] = {a.scale, a.scale}, ones[2] = {1.0f, 1.0f};
#pragma unroll
  for (int m = 0; m < kParts; ++m) {
    const int from = first + warp_row + m * 16;
    store_rows<kColumns>(d_k[m], scales, a.d_k.head<T>(b, kv) + first_column, a.d_k, from, a.keys,
                         a.dim - first_column);
    store_rows<kColumns>(d_v[m], ones, a.d_v.head<T>(b, kv) + first_column, a.d_v, from, a.keys,
                         a.dim - first_column);
  }
}

// d_q of queries of a head, over the keys that they see.
template <typename T, int kDim>
__global__ void __launch_bounds__(kMmaThreads) query_gradients_mma(const AttentionArguments a) {
  using Tiles = QueryTiles<kDim>;
  constexpr int kTile = Tiles::kTile, kParts = Tiles::kParts;
  constexpr int kTileSize = kTile * kMmaPitch<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q = reinterpret_cast<T*>(shared);
  T* const d_out = q + Tiles::kOwned * kMmaPitch<kDim>;
  T* const tiles = d_out + Tiles::kOwned * kMmaPitch<kDim>;  // [2 stages][k, v]
  const int all_heads = a.batch * a.heads;
  const int head = static_cast<int>(blockIdx.x) % all_heads;
  const int b = head / a.heads, h = head % a.heads, kv = h / (a.heads / a.kv_heads);
  const int blocks = (a.queries + Tiles::kOwned - 1) / Tiles::kOwned;
  const int first = (blocks - 1 - static_cast<int>(blockIdx.x) / all_heads) * Tiles::kOwned;
  const int keys = a.keys_before(min(first + Tiles::kOwned, a.queries));

  const auto load = [&](int s) {
    T* const stage = tiles + s / kTile % 2 * 2 * kTileSize;
    load_rows<kTile, kDim>(stage, a.k.head<const T>(b, kv), a.k, s, a.keys, a.dim);
    load_rows<kTile, kDim>(stage + kTileSize, a.v.head<const T>(b, kv), a.v, s, a.keys, a.dim);
  };
  load_rows<Tiles::kOwned, kDim>(q, a.q.head<const T>(b, h), a.q, first, a.queries, a.dim);
  load_rows<Tiles::kOwned, kDim>(d_out, a.d_out.head<const T>(b, h), a.d_out, first, a.queries,
                                 a.dim);
  if (keys > 0) load(0);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tiles::kWarpRows;
  const int row = first + warp_row + static_cast<int>(threadIdx.x % 32) / 4;
  float reference[kParts][2], delta[kParts][2];
#pragma unroll
  for (int m = 0; m < kParts; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[m][i] = reference_of(a, head, row + m * 16 + 8 * i);
      delta[m][i] = delta_of(a, head, row + m * 16 + 8 * i);
    }
  }
  const float log2_scale = a.scale * kAttentionLog2E;
  float d_q[kParts][kDim / 8][4] = {};
  for (int s = 0; s < keys; s += kTile) {
    copies_wait();
    __syncthreads();
    if (s + kTile < keys) load(s + kTile);
    const T* const k = tiles + s / kTile % 2 * 2 * kTileSize;
    float p[kParts][kTile / 8][4] = {}, d[kParts][kTile / 8][4] = {};
    multiply_rows<kDim>(p, q + warp_row * kMmaPitch<kDim>, k);
    multiply_rows<kDim>(d, d_out + warp_row * kMmaPitch<kDim>, k + kTileSize);
    if (!a.sees(first, s + kTile - 1)) {
      each_score(p, [&](float& score, int m, int n, int j) {
        if (!a.sees(row + m * 16 + score_row(j), s + score_column(n, j))) score = -INFINITY;
      });
    }
    each_score(d, [&](float& score, int m, int n, int j) {
      score =
          exp2_fast(fmaf(p[m][n][j], log2_scale, -reference[m][j / 2])) * (score - delta[m][j / 2]);
    });
    multiply_scores<kDim>(d_q, d, k);
  }
  copies_wait();
  const float scales[2] = {a.scale, a.scale};
#pragma unroll
  for (int m = 0; m < kParts; ++m)
    store_rows<kDim>(d_q[m], scales, a.d_q.head<T>(b, h), a.d_q, first + warp_row + m * 16,
                     a.queries, a.dim);
}

}  // namespace logitless::cuda

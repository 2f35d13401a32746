// Attention of bf16 and f16 by mma.sync: compute capability 8.0 or later, dim <= kDim, 64 or 128.
//
// A CTA of four warps owns 64 rows, 16 a warp: queries in the forward and for d_q, keys for d_k and
// d_v. The other operand streams through shared memory in tiles. Scores stay in registers, where
// the accumulators of one GEMM are the left operand of the next. The owner's sums follow the order
// of the tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/fast_math.cuh"
#include "kernels/cuda/device/mma_sm80.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/tensor/attention/arguments.cuh"

namespace logitless::cuda {

inline constexpr int kMmaThreads = 128;
inline constexpr int kOwnedRows = 64;
inline constexpr float kAttentionLog2E = 1.4426950408889634f;
inline constexpr float kAttentionLn2 = 0.6931471805599453f;

// Elements from row to row in shared memory: padded by 16 bytes, so that eight rows at the same
// column are in different banks.
template <int kDim>
inline constexpr int kMmaPitch = kDim + 8;
// Rows of a streamed tile in the backward, limited by the registers of its scores.
template <int kDim>
inline constexpr int kPassingRows = kDim <= 64 ? 64 : 32;

template <int kDim>
inline constexpr int kForwardMmaShared = 3 * 64 * kMmaPitch<kDim> * 2;
template <int kDim>
inline constexpr int kBackwardMmaShared =
    (2 * kOwnedRows + 4 * kPassingRows<kDim>)*kMmaPitch<kDim> * 2 + 4 * kPassingRows<kDim> * 4;

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

// z [16][8 kBlocks] += a . b^T; a: the warp's 16 rows.
template <int kBlocks, int kDim, typename T>
__device__ __forceinline__ void multiply_rows(float (&z)[kBlocks][4], const T* a, const T* b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    std::uint32_t left[4];
    load_matrices<false>(left, a + lane % 16 * kMmaPitch<kDim> + step * 16 + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      std::uint32_t right[4];
      load_matrices<false>(right, b + (n * 8 + lane / 16 * 8 + lane % 8) * kMmaPitch<kDim> +
                                      step * 16 + lane / 8 % 2 * 8);
      mma<T>(z[n], left, right[0], right[1]);
      mma<T>(z[n + 1], left, right[2], right[3]);
    }
  }
}

// sum [16][kDim] += z [16][8 kBlocks] . b [8 kBlocks][kDim], z rounded.
template <int kBlocks, int kDim, typename T>
__device__ __forceinline__ void multiply_scores(float (&sum)[kDim / 8][4],
                                                const float (&z)[kBlocks][4], const T* b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kBlocks / 2; ++step) {
    const std::uint32_t left[4] = {pair_of<T>(z[2 * step][0], z[2 * step][1]),
                                   pair_of<T>(z[2 * step][2], z[2 * step][3]),
                                   pair_of<T>(z[2 * step + 1][0], z[2 * step + 1][1]),
                                   pair_of<T>(z[2 * step + 1][2], z[2 * step + 1][3])};
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      std::uint32_t right[4];
      load_matrices<true>(right,
                          b + (step * 16 + lane % 16) * kMmaPitch<kDim> + n * 8 + lane / 16 * 8);
      mma<T>(sum[n], left, right[0], right[1]);
      mma<T>(sum[n + 1], left, right[2], right[3]);
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

// Online softmax of a thread's two rows, in log2 units.
struct RunningSoftmax {
  float top[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};  // sums of the thread's columns

  // Replaces scaled scores z, -inf where masked, by exponentials; alpha: factor that rescales the
  // sums so far.
  template <int kBlocks>
  __device__ __forceinline__ void add(float (&z)[kBlocks][4], float (&alpha)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = top[h];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) now = fmaxf(now, fmaxf(z[n][2 * h], z[n][2 * h + 1]));
      now = quad_max(now);
      const float base = now == -INFINITY ? 0.0f : now;
      alpha[h] = exp2_fast(top[h] - base);
      float part = 0.0f;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int j = 2 * h; j < 2 * h + 2; ++j) part += z[n][j] = exp2_fast(z[n][j] - base);
      }
      sum[h] = sum[h] * alpha[h] + part;
      top[h] = now;
    }
  }
};

// CTA order: the last block of queries, which sees most keys, of all heads first.
template <typename T, int kDim>
__global__ void __launch_bounds__(kMmaThreads) forward_mma(const AttentionArguments a) {
  constexpr int kTile = 64;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = q + kOwnedRows * kMmaPitch<kDim>;
  T* const v = k + kTile * kMmaPitch<kDim>;
  const int all_heads = a.batch * a.heads;
  const int head = static_cast<int>(blockIdx.x) % all_heads;
  const int b = head / a.heads, h = head % a.heads, kv = h / (a.heads / a.kv_heads);
  const int blocks = (a.queries + kOwnedRows - 1) / kOwnedRows;
  const int first = (blocks - 1 - static_cast<int>(blockIdx.x) / all_heads) * kOwnedRows;
  const int keys = a.keys_before(min(first + kOwnedRows, a.queries));
  const T* const k_head = a.k.head<const T>(b, kv);
  const T* const v_head = a.v.head<const T>(b, kv);

  load_rows<kOwnedRows, kDim>(q, a.q.head<const T>(b, h), a.q, first, a.queries, a.dim);
  if (keys > 0) load_rows<kTile, kDim>(k, k_head, a.k, 0, a.keys, a.dim);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int row = first + warp_row + static_cast<int>(threadIdx.x % 32) / 4;
  const float log2_scale = a.scale * kAttentionLog2E;
  float sum[kDim / 8][4] = {};
  RunningSoftmax softmax;
  for (int s = 0; s < keys; s += kTile) {
    copies_wait();
    __syncthreads();
    load_rows<kTile, kDim>(v, v_head, a.v, s, a.keys, a.dim);
    float z[kTile / 8][4] = {};
    multiply_rows<kTile / 8, kDim>(z, q + warp_row * kMmaPitch<kDim>, k);
    copies_wait();
    __syncthreads();
    if (s + kTile < keys) load_rows<kTile, kDim>(k, k_head, a.k, s + kTile, a.keys, a.dim);
    const bool all_seen = a.sees(first, s + kTile - 1);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = s + n * 8 + static_cast<int>(threadIdx.x % 4) * 2 + j % 2;
        z[n][j] = all_seen || a.sees(row + j / 2 * 8, key) ? z[n][j] * log2_scale : -INFINITY;
      }
    }
    float alpha[2];
    softmax.add(z, alpha);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[n][j] *= alpha[j / 2];
    }
    multiply_scores<kTile / 8, kDim>(sum, z, v);
  }

  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float total = quad_sum(softmax.sum[i]);
    inverse[i] = total == 0.0f ? 0.0f : 1.0f / total;
    const int r = row + 8 * i;
    if (threadIdx.x % 4 == 0 && r < a.queries) {
      a.lse[static_cast<std::int64_t>(head) * a.queries + r] =
          total == 0.0f ? -INFINITY : (softmax.top[i] + log2f(total)) * kAttentionLn2;
    }
  }
  store_rows<kDim>(sum, inverse, a.out.head<T>(b, h), a.out, first + warp_row, a.queries, a.dim);
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

// d_k and d_v of 64 keys of a kv head: over the heads of its group and the queries that see them.
template <typename T, int kDim>
__global__ void __launch_bounds__(kMmaThreads) key_gradients_mma(const AttentionArguments a) {
  constexpr int kTile = kPassingRows<kDim>;
  constexpr int kTileSize = kTile * kMmaPitch<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const k = reinterpret_cast<T*>(shared);
  T* const v = k + kOwnedRows * kMmaPitch<kDim>;
  T* const tiles = v + kOwnedRows * kMmaPitch<kDim>;                      // [2 stages][q, d_out]
  auto* const numbers = reinterpret_cast<float*>(tiles + 4 * kTileSize);  // [2][reference, delta]
  const int all_heads = a.batch * a.kv_heads;
  const int b = static_cast<int>(blockIdx.x) % all_heads / a.kv_heads;
  const int kv = static_cast<int>(blockIdx.x) % a.kv_heads;
  const int first = static_cast<int>(blockIdx.x) / all_heads * kOwnedRows;
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
    if (at < kTile) {
      n[at] = reference_of(a, head, query + at);
      n[kTile + at] = delta_of(a, head, query + at);
    }
  };
  load_rows<kOwnedRows, kDim>(k, a.k.head<const T>(b, kv), a.k, first, a.keys, a.dim);
  load_rows<kOwnedRows, kDim>(v, a.v.head<const T>(b, kv), a.v, first, a.keys, a.dim);
  if (count > 0) load(0);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int row = first + warp_row + static_cast<int>(threadIdx.x % 32) / 4;
  const float log2_scale = a.scale * kAttentionLog2E;
  float d_k[kDim / 8][4] = {}, d_v[kDim / 8][4] = {};
  for (int i = 0; i < count; ++i) {
    copies_wait();
    __syncthreads();
    if (i + 1 < count) load(i + 1);
    const T* const q = tiles + i % 2 * 2 * kTileSize;
    const T* const d_out = q + kTileSize;
    const float* const reference = numbers + i % 2 * 2 * kTile;
    const float* const delta = reference + kTile;
    const int query = (first_tile + i % tiles_of_head) * kTile;
    const bool all_seen = a.sees(query, min(first + kOwnedRows, a.keys) - 1);

    float p[kTile / 8][4] = {};
    multiply_rows<kTile / 8, kDim>(p, k + warp_row * kMmaPitch<kDim>, q);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = n * 8 + static_cast<int>(threadIdx.x % 4) * 2 + j % 2;
        p[n][j] = all_seen || a.sees(query + column, row + j / 2 * 8)
                      ? exp2_fast(fmaf(p[n][j], log2_scale, -reference[column]))
                      : 0.0f;
      }
    }
    multiply_scores<kTile / 8, kDim>(d_v, p, d_out);
    float d[kTile / 8][4] = {};
    multiply_rows<kTile / 8, kDim>(d, v + warp_row * kMmaPitch<kDim>, d_out);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = n * 8 + static_cast<int>(threadIdx.x % 4) * 2 + j % 2;
        d[n][j] = p[n][j] * (d[n][j] - delta[column]);
      }
    }
    multiply_scores<kTile / 8, kDim>(d_k, d, q);
  }
  copies_wait();
  const float scales[2] = {a.scale, a.scale}, ones[2] = {1.0f, 1.0f};
  store_rows<kDim>(d_k, scales, a.d_k.head<T>(b, kv), a.d_k, first + warp_row, a.keys, a.dim);
  store_rows<kDim>(d_v, ones, a.d_v.head<T>(b, kv), a.d_v, first + warp_row, a.keys, a.dim);
}

// d_q of 64 queries of a head, over the keys that they see.
template <typename T, int kDim>
__global__ void __launch_bounds__(kMmaThreads) query_gradients_mma(const AttentionArguments a) {
  constexpr int kTile = kPassingRows<kDim>;
  constexpr int kTileSize = kTile * kMmaPitch<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q = reinterpret_cast<T*>(shared);
  T* const d_out = q + kOwnedRows * kMmaPitch<kDim>;
  T* const tiles = d_out + kOwnedRows * kMmaPitch<kDim>;  // [2 stages][k, v]
  const int all_heads = a.batch * a.heads;
  const int head = static_cast<int>(blockIdx.x) % all_heads;
  const int b = head / a.heads, h = head % a.heads, kv = h / (a.heads / a.kv_heads);
  const int blocks = (a.queries + kOwnedRows - 1) / kOwnedRows;
  const int first = (blocks - 1 - static_cast<int>(blockIdx.x) / all_heads) * kOwnedRows;
  const int keys = a.keys_before(min(first + kOwnedRows, a.queries));

  const auto load = [&](int s) {
    T* const stage = tiles + s / kTile % 2 * 2 * kTileSize;
    load_rows<kTile, kDim>(stage, a.k.head<const T>(b, kv), a.k, s, a.keys, a.dim);
    load_rows<kTile, kDim>(stage + kTileSize, a.v.head<const T>(b, kv), a.v, s, a.keys, a.dim);
  };
  load_rows<kOwnedRows, kDim>(q, a.q.head<const T>(b, h), a.q, first, a.queries, a.dim);
  load_rows<kOwnedRows, kDim>(d_out, a.d_out.head<const T>(b, h), a.d_out, first, a.queries, a.dim);
  if (keys > 0) load(0);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int row = first + warp_row + static_cast<int>(threadIdx.x % 32) / 4;
  const float reference[2] = {reference_of(a, head, row), reference_of(a, head, row + 8)};
  const float delta[2] = {delta_of(a, head, row), delta_of(a, head, row + 8)};
  const float log2_scale = a.scale * kAttentionLog2E;
  float d_q[kDim / 8][4] = {};
  for (int s = 0; s < keys; s += kTile) {
    copies_wait();
    __syncthreads();
    if (s + kTile < keys) load(s + kTile);
    const T* const k = tiles + s / kTile % 2 * 2 * kTileSize;
    const T* const v = k + kTileSize;
    const bool all_seen = a.sees(first, s + kTile - 1);
    float p[kTile / 8][4] = {}, d[kTile / 8][4] = {};
    multiply_rows<kTile / 8, kDim>(p, q + warp_row * kMmaPitch<kDim>, k);
    multiply_rows<kTile / 8, kDim>(d, d_out + warp_row * kMmaPitch<kDim>, v);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = s + n * 8 + static_cast<int>(threadIdx.x % 4) * 2 + j % 2;
        const float e = all_seen || a.sees(row + j / 2 * 8, key)
                            ? exp2_fast(fmaf(p[n][j], log2_scale, -reference[j / 2]))
                            : 0.0f;
        d[n][j] = e * (d[n][j] - delta[j / 2]);
      }
    }
    multiply_scores<kTile / 8, kDim>(d_q, d, k);
  }
  copies_wait();
  const float scales[2] = {a.scale, a.scale};
  store_rows<kDim>(d_q, scales, a.d_q.head<T>(b, h), a.d_q, first + warp_row, a.queries, a.dim);
}

}  // namespace logitless::cuda

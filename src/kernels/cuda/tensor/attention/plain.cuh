// Attention by plain arithmetic, for every dtype and dim <= 256: slow reference path.
//
// A warp owns a row: a query in the forward and for d_q, a key for d_k and d_v. Rows of the other
// operand stream through shared memory, 32 at a time in fp32. Each lane computes the score of one
// of them. Then each lane accumulates all of them in its columns: lane, lane + 32, ... Sums follow
// the order of the rows.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/tensor/attention/arguments.cuh"

namespace logitless::cuda {

inline constexpr int kPlainWarps = 8;
inline constexpr int kPlainTile = 32;
inline constexpr int kPlainMaxDim = 256;
inline constexpr int kPlainColumns = kPlainMaxDim / 32;  // columns of a lane

// Two tiles, and two rows of each warp.
constexpr int plain_shared(int dim) {
  return (2 * kPlainTile * (dim + 1) + 2 * kPlainWarps * dim) * 4;
}

// Shared memory of a CTA: tiles [2][kPlainTile][dim + 1], rows of the warps [2][kPlainWarps][dim].
struct PlainMemory {
  __device__ __forceinline__ PlainMemory(float* shared, int dim)
      : tiles{shared, shared + kPlainTile * (dim + 1)},
        rows{tiles[1] + kPlainTile * (dim + 1) + static_cast<int>(threadIdx.x) / 32 * dim,
             rows[0] + kPlainWarps * dim} {}
  float* tiles[2];
  float* rows[2];  // the warp's
};

// Loads rows [first, first + 32) of a head; 0 past its last.
template <typename T>
__device__ __forceinline__ void load_plain_tile(float* to, const T* head, const AttentionRows& rows,
                                                int first, int count, int dim) {
  for (int i = static_cast<int>(threadIdx.x); i < kPlainTile * dim; i += kPlainWarps * 32) {
    const int row = first + i / dim;
    to[i / dim * (dim + 1) + i % dim] =
        row < count ? as_float(head[row * rows.stride_t + i % dim]) : 0.0f;
  }
}
template <typename T>
__device__ __forceinline__ void load_plain_row(float* to, const T* head, const AttentionRows& rows,
                                               int row, int count, int dim) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < dim; i += 32)
    to[i] = row < count ? as_float(head[row * rows.stride_t + i]) : 0.0f;
}

__device__ __forceinline__ float plain_dot(const float* a, const float* b, int dim) {
  float sum = 0.0f;
  for (int i = 0; i < dim; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// sum[columns] += the sum over the lanes of weight * the lane's row of the tile.
template <typename T>
__device__ __forceinline__ void add_plain_rows(float (&sum)[kPlainColumns], float weight,
                                               const float* tile, int dim) {
  weight = as_float(rounded<T>(weight));
  for (int j = 0; j < kPlainTile; ++j) {
    const float w = __shfl_sync(~0u, weight, j);
#pragma unroll
    for (int c = 0; c < kPlainColumns; ++c) {
      const int column = c * 32 + static_cast<int>(threadIdx.x) % 32;
      if (column < dim) sum[c] = fmaf(w, tile[j * (dim + 1) + column], sum[c]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_plain_row(const float (&sum)[kPlainColumns], float factor,
                                                T* to, int dim) {
#pragma unroll
  for (int c = 0; c < kPlainColumns; ++c) {
    const int column = c * 32 + static_cast<int>(threadIdx.x) % 32;
    if (column < dim) to[column] = rounded<T>(sum[c] * factor);
  }
}

__device__ __forceinline__ float plain_warp_max(float v) {
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
  return v;
}
__device__ __forceinline__ float plain_warp_sum(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// Position of a CTA: a block of kPlainWarps rows of one head of [B, heads].
struct PlainPosition {
  __device__ __forceinline__ PlainPosition(int batch, int heads)
      : head(static_cast<int>(blockIdx.x) % (batch * heads)),
        b(head / heads),
        h(head % heads),
        first(static_cast<int>(blockIdx.x) / (batch * heads) * kPlainWarps),
        row(first + static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32) {}
  int head, b, h, first, row, lane;
};

template <typename T>
__global__ void __launch_bounds__(kPlainWarps * 32) forward_plain(const AttentionArguments a) {
  extern __shared__ float plain_memory[];
  const PlainMemory memory(plain_memory, a.dim);
  const PlainPosition at(a.batch, a.heads);
  const int kv = at.h / (a.heads / a.kv_heads);
  const int keys = a.keys_before(min(at.first + kPlainWarps, a.queries));
  const float* const k = memory.tiles[0];
  const float* const v = memory.tiles[1];
  load_plain_row(memory.rows[0], a.q.head<const T>(at.b, at.h), a.q, at.row, a.queries, a.dim);
  float sum[kPlainColumns] = {};
  float top = -INFINITY, total = 0.0f;
  for (int s = 0; s < keys; s += kPlainTile) {
    __syncthreads();
    load_plain_tile(memory.tiles[0], a.k.head<const T>(at.b, kv), a.k, s, a.keys, a.dim);
    load_plain_tile(memory.tiles[1], a.v.head<const T>(at.b, kv), a.v, s, a.keys, a.dim);
    __syncthreads();
    const float z = a.sees(at.row, s + at.lane)
                        ? plain_dot(memory.rows[0], k + at.lane * (a.dim + 1), a.dim) * a.scale
                        : -INFINITY;
    const float now = fmaxf(top, plain_warp_max(z));
    const float base = now == -INFINITY ? 0.0f : now;
    const float p = expf(z - base), alpha = expf(top - base);
    top = now;
    total = total * alpha + p;
#pragma unroll
    for (int c = 0; c < kPlainColumns; ++c) sum[c] *= alpha;
    add_plain_rows<T>(sum, p, v, a.dim);
  }
  total = plain_warp_sum(total);
  if (at.row >= a.queries) return;
  store_plain_row(sum, total == 0.0f ? 0.0f : 1.0f / total,
                  a.out.head<T>(at.b, at.h) + at.row * a.out.stride_t, a.dim);
  if (at.lane == 0) {
    a.lse[static_cast<std::int64_t>(at.head) * a.queries + at.row] =
        total == 0.0f ? -INFINITY : top + logf(total);
  }
}

// Probability of a key for a query, and the gradient of their scaled score.
struct PlainScore {
  __device__ __forceinline__ PlainScore(const AttentionArguments& a, std::int64_t head, int query,
                                        int key, const float* q, const float* k, const float* v,
                                        const float* d_out) {
    if (query >= a.queries || !a.sees(query, key)) return;
    p = expf(plain_dot(q, k, a.dim) * a.scale - a.lse[head * a.queries + query]);
    d = p * (plain_dot(d_out, v, a.dim) - a.delta[head * a.queries + query]);
  }
  float p = 0.0f;
  float d = 0.0f;
};

template <typename T>
__global__ void __launch_bounds__(kPlainWarps * 32)
    query_gradients_plain(const AttentionArguments a) {
  extern __shared__ float plain_memory[];
  const PlainMemory memory(plain_memory, a.dim);
  const PlainPosition at(a.batch, a.heads);
  const int kv = at.h / (a.heads / a.kv_heads);
  const int keys = a.keys_before(min(at.first + kPlainWarps, a.queries));
  load_plain_row(memory.rows[0], a.q.head<const T>(at.b, at.h), a.q, at.row, a.queries, a.dim);
  load_plain_row(memory.rows[1], a.d_out.head<const T>(at.b, at.h), a.d_out, at.row, a.queries,
                 a.dim);
  float d_q[kPlainColumns] = {};
  for (int s = 0; s < keys; s += kPlainTile) {
    __syncthreads();
    load_plain_tile(memory.tiles[0], a.k.head<const T>(at.b, kv), a.k, s, a.keys, a.dim);
    load_plain_tile(memory.tiles[1], a.v.head<const T>(at.b, kv), a.v, s, a.keys, a.dim);
    __syncthreads();
    const PlainScore score(a, at.head, at.row, s + at.lane, memory.rows[0],
                           memory.tiles[0] + at.lane * (a.dim + 1),
                           memory.tiles[1] + at.lane * (a.dim + 1), memory.rows[1]);
    add_plain_rows<T>(d_q, score.d, memory.tiles[0], a.dim);
  }
  if (at.row < a.queries)
    store_plain_row(d_q, a.scale, a.d_q.head<T>(at.b, at.h) + at.row * a.d_q.stride_t, a.dim);
}

template <typename T>
__global__ void __launch_bounds__(kPlainWarps * 32)
    key_gradients_plain(const AttentionArguments a) {
  extern __shared__ float plain_memory[];
  const PlainMemory memory(plain_memory, a.dim);
  const PlainPosition at(a.batch, a.kv_heads);
  const int group = a.heads / a.kv_heads;
  load_plain_row(memory.rows[0], a.k.head<const T>(at.b, at.h), a.k, at.row, a.keys, a.dim);
  load_plain_row(memory.rows[1], a.v.head<const T>(at.b, at.h), a.v, at.row, a.keys, a.dim);
  float d_k[kPlainColumns] = {}, d_v[kPlainColumns] = {};
  for (int h = at.h * group; h < (at.h + 1) * group; ++h) {
    for (int t = a.first_query(at.first) / kPlainTile * kPlainTile; t < a.queries;
         t += kPlainTile) {
      __syncthreads();
      load_plain_tile(memory.tiles[0], a.q.head<const T>(at.b, h), a.q, t, a.queries, a.dim);
      load_plain_tile(memory.tiles[1], a.d_out.head<const T>(at.b, h), a.d_out, t, a.queries,
                      a.dim);
      __syncthreads();
      const PlainScore score(a, static_cast<std::int64_t>(at.b) * a.heads + h, t + at.lane, at.row,
                             memory.tiles[0] + at.lane * (a.dim + 1), memory.rows[0],
                             memory.rows[1], memory.tiles[1] + at.lane * (a.dim + 1));
      add_plain_rows<T>(d_v, score.p, memory.tiles[1], a.dim);
      add_plain_rows<T>(d_k, score.d, memory.tiles[0], a.dim);
    }
  }
  if (at.row >= a.keys) return;
  store_plain_row(d_k, a.scale, a.d_k.head<T>(at.b, at.h) + at.row * a.d_k.stride_t, a.dim);
  store_plain_row(d_v, 1.0f, a.d_v.head<T>(at.b, at.h) + at.row * a.d_v.stride_t, a.dim);
}

}  // namespace logitless::cuda

// Attention backward on Hopper: bf16, dim <= kDim, 64 or 128. Five GEMMs, and no sum in arbitrary
// order.
//
// A CTA takes 128 keys of a kv head at a time, 64 for each of its two consumer warpgroups. These
// hold d_k and d_v in registers. The queries that see the keys stream through in tiles of
// kQueryTile. Scores are computed transposed, keys x queries, so that they are directly the left
// operands of d_k and d_v. For d_q they pass through shared memory.
//
// d_q of a tile is accumulated over its blocks of keys in fp32, in the order of the blocks. A
// counter of each tile counts the blocks that have added to it. The first block stores. The last
// adds the accumulated sum, rounds and writes d_q. CTAs take blocks by a ticket, the first blocks
// of all heads of a group before the second ones. So a CTA only waits for earlier tickets, whose
// CTAs are resident or done.
#pragma once

#include "kernels/cuda/tensor/attention/forward_sm90.cuh"
#include "kernels/cuda/tensor/attention/sizes.h"

namespace logitless::cuda {

// Scratch of the backward: fp32, rows of a head padded to full tiles.
struct BackwardScratch {
  float* reference;    // [B H][padded]: log-sum-exp in log2, +inf where no key is seen
  float* delta;        // [B H][padded]
  unsigned* counters;  // [B H][tiles]: blocks of keys that have added to d_q; then the ticket
  float* d_q;          // [B H][tiles][kQueryTile kDim], in register order
  int padded;
};

template <int kDim>
struct BackwardShared {
  static constexpr int kAtoms = kDim / 64;
  static constexpr int kQueryTile = attention_query_tile(kDim);
  static constexpr int kBlock = 128;                     // keys
  static constexpr int kStages = 2;                      // pipeline stages of queries
  static constexpr int kKeyStages = kDim == 64 ? 2 : 1;  // as shared memory allows
  static constexpr int kKeyBytes = kBlock * kDim * 2;
  static constexpr int kTileBytes = kQueryTile * kDim * 2;
  static constexpr int kScoreBytes = kBlock * kQueryTile * 2;
  static constexpr int kSumBytes = kQueryTile * kDim * 4;  // of d_q
  static constexpr int kRowBytes = kQueryTile * 4;
  static constexpr int kBytes = 2 * kKeyStages * kKeyBytes + 2 * kStages * kTileBytes +
                                2 * kScoreBytes + kSumBytes + 2 * kStages * kRowBytes + 256;

  // raw: aligned to the swizzle's 1024 bytes.
  __device__ __forceinline__ explicit BackwardShared(unsigned char* raw)
      : k(raw),
        v(k + kKeyStages * kKeyBytes),
        q(v + kKeyStages * kKeyBytes),
        d_out(q + kStages * kTileBytes),
        d_scores(d_out + kStages * kTileBytes),
        d_q(d_scores + 2 * kScoreBytes),
        reference(reinterpret_cast<float*>(d_q + kSumBytes)),
        delta(reference + kStages * kQueryTile),
        keys_full(reinterpret_cast<std::uint64_t*>(delta + kStages * kQueryTile)),
        keys_empty(keys_full + kKeyStages),
        q_full(keys_empty + kKeyStages),
        q_empty(q_full + kStages),
        d_out_full(q_empty + kStages),
        d_out_empty(d_out_full + kStages),
        d_q_full(d_out_empty + kStages),
        d_q_empty(d_q_full + 1),
        sums_full(d_q_empty + 1),
        ticket_full(sums_full + 1),
        ticket_empty(ticket_full + 1),
        ticket(reinterpret_cast<int*>(ticket_empty + 1)) {}
  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kKeyStages; ++i) {
        barrier_init(keys_full + i, 1);
        barrier_init(keys_empty + i, 8);
      }
      for (int i = 0; i < kStages; ++i) {
        barrier_init(q_full + i, 1);
        barrier_init(q_empty + i, 8);
        barrier_init(d_out_full + i, 1);
        barrier_init(d_out_empty + i, 8);
      }
      barrier_init(d_q_full, 256);
      barrier_init(d_q_empty, 1);
      barrier_init(sums_full, 1);
      barrier_init(ticket_full, 1);
      barrier_init(ticket_empty, 9);
      barrier_init_fence();
    }
    __syncthreads();
  }
  unsigned char *k, *v;      // [key stages][atoms][128 keys][128 bytes]
  unsigned char *q, *d_out;  // [stages][atoms][kQueryTile][128 bytes]
  unsigned char* d_scores;   // [2][query atoms][128 keys][128 bytes]
  unsigned char* d_q;        // fp32, in register order
  float *reference, *delta;  // [stages][kQueryTile]
  std::uint64_t *keys_full, *keys_empty, *q_full, *q_empty, *d_out_full, *d_out_empty, *d_q_full,
      *d_q_empty, *sums_full, *ticket_full, *ticket_empty;
  int* ticket;
};

// A block of keys, and the tiles of queries that stream through, for each query head of the group.
template <int kDim>
struct KeyBlock {
  using Shared = BackwardShared<kDim>;
  // order: over kv heads and blocks of keys.
  __device__ __forceinline__ KeyBlock(const AttentionArguments& a, const AttentionOrder& order,
                                      int ticket) {
    int head;
    order.place(ticket, head, block);
    b = head / a.kv_heads;
    kv = head % a.kv_heads;
    group = a.heads / a.kv_heads;
    first_key = block * Shared::kBlock;
    // The first block visits all tiles, so that d_q of queries that see no key is written.
    first_tile = block == 0 ? 0 : a.first_query(first_key) / Shared::kQueryTile;
    tiles = (a.queries + Shared::kQueryTile - 1) / Shared::kQueryTile - first_tile;
  }
  __device__ __forceinline__ int count() const { return tiles * group; }
  __device__ __forceinline__ int query_head(int i) const { return kv * group + i / tiles; }
  __device__ __forceinline__ int query_tile(int i) const { return first_tile + i % tiles; }
  // Returns true if no later block adds to d_q of a tile.
  __device__ __forceinline__ bool last(const AttentionArguments& a, int tile) const {
    const int keys = a.keys_before(min((tile + 1) * Shared::kQueryTile, a.queries));
    return block >= (keys - 1) / Shared::kBlock;
  }
  int block, b, kv, group, first_key, first_tile, tiles;
};

// Reads the CTA's next ticket in a consumer warp; -1: none is left.
struct TicketReader {
  std::uint32_t phase = 0;
  template <typename Shared>
  __device__ __forceinline__ int next(const Shared& shared, int count) {
    barrier_wait(shared.ticket_full, phase);
    const int ticket = *reinterpret_cast<volatile int*>(shared.ticket);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.ticket_empty);
    phase ^= 1;
    // Broadcast, so that the compiler knows it is warp-uniform: wgmmas may be in flight across
    // branches on it.
    return __shfl_sync(~0u, ticket < count ? ticket : -1, 0);
  }
};

// Producer: one thread, which also draws the tickets.
template <int kDim>
__device__ __forceinline__ void load_backward(
    const BackwardShared<kDim>& shared, const AttentionArguments& a, const AttentionOrder& order,
    const BackwardScratch& scratch, unsigned* tickets, const CUtensorMap* q_map,
    const CUtensorMap* d_out_map, const CUtensorMap* k_map, const CUtensorMap* v_map) {
  using Shared = BackwardShared<kDim>;
  RingCursor<Shared::kStages> at;
  RingCursor<Shared::kKeyStages> keys_at;
  for (std::uint32_t phase = 0;; phase ^= 1) {
    const int ticket = static_cast<int>(atomicAdd(tickets, 1u));
    barrier_wait(shared.ticket_empty, phase ^ 1);
    *reinterpret_cast<volatile int*>(shared.ticket) = ticket;
    barrier_arrive(shared.ticket_full);
    if (ticket >= order.count()) return;
    const KeyBlock<kDim> block(a, order, ticket);
    std::uint64_t* const keys_full = shared.keys_full + keys_at.stage;
    barrier_wait(shared.keys_empty + keys_at.stage, keys_at.phase ^ 1);
    barrier_expect(keys_full, 2 * Shared::kKeyBytes);
    for (int atom = 0; atom < Shared::kAtoms; ++atom) {
      const int place = keys_at.stage * Shared::kKeyBytes + atom * Shared::kBlock * 128;
      tma_load_head(shared.k + place, k_map, keys_full, atom * 64, block.first_key, block.kv,
                    block.b);
      tma_load_head(shared.v + place, v_map, keys_full, atom * 64, block.first_key, block.kv,
                    block.b);
    }
    keys_at.advance();
    for (int i = 0; i < block.count(); ++i) {
      const int h = block.query_head(i), first = block.query_tile(i) * Shared::kQueryTile;
      const std::int64_t row =
          (static_cast<std::int64_t>(block.b) * a.heads + h) * scratch.padded + first;
      const auto load = [&](unsigned char* to, const CUtensorMap* map, float* rows_to,
                            const float* rows, std::uint64_t* full, std::uint64_t* empty) {
        barrier_wait(empty + at.stage, at.phase ^ 1);
        barrier_expect(full + at.stage, Shared::kTileBytes + Shared::kRowBytes);
        for (int atom = 0; atom < Shared::kAtoms; ++atom) {
          tma_load_head(to + at.stage * Shared::kTileBytes + atom * Shared::kQueryTile * 128, map,
                        full + at.stage, atom * 64, first, h, block.b);
        }
        bulk_load(rows_to + at.stage * Shared::kQueryTile, rows + row, Shared::kRowBytes,
                  full + at.stage);
      };
      load(shared.q, q_map, shared.reference, scratch.reference, shared.q_full, shared.q_empty);
      load(shared.d_out, d_out_map, shared.delta, scratch.delta, shared.d_out_full,
           shared.d_out_empty);
      at.advance();
    }
  }
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(unsigned* to, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Accumulates d_q: one thread. Where a block is the last of a tile, it fetches the earlier sum.
template <int kDim>
__device__ __forceinline__ void add_query_gradients(const BackwardShared<kDim>& shared,
                                                    const AttentionArguments& a,
                                                    const AttentionOrder& order,
                                                    const BackwardScratch& scratch) {
  using Shared = BackwardShared<kDim>;
  constexpr int kTile = Shared::kQueryTile;
  const int tiles = scratch.padded / kTile;
  std::uint32_t phase = 0;
  for (std::uint32_t ticket_phase = 0;; ticket_phase ^= 1) {
    barrier_wait(shared.ticket_full, ticket_phase);
    const int ticket = *reinterpret_cast<volatile int*>(shared.ticket);
    barrier_arrive(shared.ticket_empty);
    if (ticket >= order.count()) return;
    const KeyBlock<kDim> block(a, order, ticket);
    const auto done = static_cast<unsigned>(block.block);
    unsigned* written = nullptr;  // counter of the tile whose sums are in flight
    // Publishes the counter when all but the latest `kLater` sums are in memory.
    const auto signal = [&]<int kLater>(std::integral_constant<int, kLater>) {
      if (written == nullptr) return;
      tma_wait_writes<kLater>();
      proxy_fence();
      store_release(written, done + 1);
      written = nullptr;
    };
    for (int i = 0; i < block.count(); ++i, phase ^= 1) {
      const int tile = block.query_tile(i);
      const std::int64_t place =
          (static_cast<std::int64_t>(block.b) * a.heads + block.query_head(i)) * tiles + tile;
      unsigned* const counter = scratch.counters + place;
      float* const sums = scratch.d_q + place * (kTile * kDim);
      if (block.block > 0) {
        if (load_acquire(counter) != done) {
          signal(std::integral_constant<int, 0>());
          while (load_acquire(counter) != done) __nanosleep(20);
        }
        proxy_fence();
      }
      if (block.last(a, tile)) {
        if (block.block > 0) {
          barrier_expect(shared.sums_full, Shared::kSumBytes);
          bulk_load(shared.d_q, sums, Shared::kSumBytes, shared.sums_full);
        }
        barrier_wait(shared.d_q_full, phase);
        barrier_arrive(shared.d_q_empty);
        continue;
      }
      barrier_wait(shared.d_q_full, phase);
      if (block.block == 0) {
        bulk_store(sums, shared.d_q, Shared::kSumBytes);
      } else {
        bulk_add(sums, shared.d_q, Shared::kSumBytes);
      }
      tma_commit();
      tma_wait_reads<0>();
      barrier_arrive(shared.d_q_empty);
      signal(std::integral_constant<int, 1>());
      written = counter;
    }
    signal(std::integral_constant<int, 0>());
  }
}

// A consumer warpgroup with its 64 keys.
template <int kDim>
struct BackwardGroup {
  using Shared = BackwardShared<kDim>;
  static constexpr int kTile = Shared::kQueryTile;
  static constexpr int kSums = kTile * kDim / 256;  // d_q elements of a thread
  const AttentionArguments& a;
  const Shared& shared;
  const int group;  // index in the CTA
  RingCursor<Shared::kStages> at;
  RingCursor<Shared::kKeyStages> keys_at;
  std::uint32_t d_q_phase = 0, sums_phase = 0;
  int d_scores_at = 0;
  float d_k[kDim / 2], d_v[kDim / 2];
  float s[kTile / 2];  // scores, later probabilities

  __device__ __forceinline__ void release(std::uint64_t* empty) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  }
  // z [64 keys][kTile] = keys . rows^T
  __device__ __forceinline__ void begin_scores(float (&z)[kTile / 2], const unsigned char* keys,
                                               const unsigned char* rows) const {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int atom = step / 4, within = step % 4 * 32;
      wgmma<0, 0>(
          z, wgmma_descriptor(keys + atom * Shared::kBlock * 128 + group * 8192 + within, 16, 1024),
          wgmma_descriptor(rows + atom * kTile * 128 + within, 16, 1024), step > 0);
    }
    wgmma_commit();
  }
  // sum [64 keys][kDim] (+)= p . rows
  __device__ __forceinline__ void begin_sums(float (&sum)[kDim / 2],
                                             const std::uint32_t (&p)[kTile / 16][4],
                                             const unsigned char* rows, bool add) const {
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step)
      wgmma<1>(sum, p[step], wgmma_descriptor(rows + step * 2048, kTile * 128, 1024),
               add || step > 0);
    wgmma_commit();
  }
  // The warpgroup's part of d_q: 64 queries, or half of the columns of the tile's 64.
  __device__ __forceinline__ void begin_query_gradients(float (&d_q)[kSums],
                                                        const unsigned char* d_scores,
                                                        const unsigned char* k) const {
    const unsigned char* const rows = d_scores + (kTile == 128 ? group * Shared::kBlock * 128 : 0);
    const unsigned char* const keys = k + (kTile == 128 ? 0 : group * Shared::kBlock * 128);
#pragma unroll
    for (int step = 0; step < Shared::kBlock / 16; ++step)
      wgmma<1, 1>(d_q, wgmma_descriptor(rows + step * 2048, Shared::kBlock * 128, 1024),
                  wgmma_descriptor(keys + step * 2048, Shared::kBlock * 128, 1024), step > 0);
    wgmma_commit();
  }
  template <int N>
  __device__ __forceinline__ static void round(std::uint32_t (&p)[N / 8][4], const float (&z)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) p[i / 4][i % 4] = bf16_pair(z[2 * i], z[2 * i + 1]);
  }

  // Turns scores into probabilities; `query` and `key`: first of the tile and of the warpgroup.
  __device__ __forceinline__ void make_probabilities(int query, int key) {
    const float log2_scale = a.scale * kLog2OfE;
    const float* const reference =
        shared.reference + at.stage * kTile + static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 r = *reinterpret_cast<const float2*>(reference + n * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * n + i] = power_of_two(fmaf(s[4 * n + i], log2_scale, i % 2 == 0 ? -r.x : -r.y));
    }
    if (a.sees(query, key + 63)) return;
    const int row = key + static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    const int column = query + static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      if (!a.sees(column + i / 4 * 8 + i % 2, row + i / 2 % 2 * 8)) s[i] = 0.0f;
    }
  }
  // Turns d from gradients of probabilities into gradients of scores.
  __device__ __forceinline__ void make_score_gradients(float (&d)[kTile / 2]) const {
    const float* const delta =
        shared.delta + at.stage * kTile + static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 r = *reinterpret_cast<const float2*>(delta + n * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        d[4 * n + i] = s[4 * n + i] * (d[4 * n + i] - (i % 2 == 0 ? r.x : r.y));
    }
  }
  __device__ __forceinline__ void put_score_gradients(const std::uint32_t (&p)[kTile / 16][4],
                                                      unsigned char* to) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = group * 64 + static_cast<int>(threadIdx.x % 128 / 32 * 16) + lane % 16;
#pragma unroll
    for (int c = 0; c < kTile / 16; ++c) {
      const int chunk = c % 4 * 2 + lane / 16;
      store_matrices(to + c / 4 * Shared::kBlock * 128 + row * 128 + ((chunk ^ (row & 7)) << 4),
                     p[c][0], p[c][1], p[c][2], p[c][3]);
    }
  }
  // Passes d_q of tile i to the accumulation, or writes its rows from the last block.
  __device__ __forceinline__ void put_query_gradients(float (&d_q)[kSums],
                                                      const KeyBlock<kDim>& block, int i) {
    const int tile = block.query_tile(i);
    unsigned char* const place =
        shared.d_q + group * (Shared::kSumBytes / 2) + static_cast<int>(threadIdx.x % 128) * 16;
    barrier_wait(shared.d_q_empty, d_q_phase ^ 1);
    d_q_phase ^= 1;
    if (!block.last(a, tile)) {
#pragma unroll
      for (int n = 0; n < kSums / 4; ++n)
        *reinterpret_cast<float4*>(place + n * 2048) =
            make_float4(d_q[4 * n], d_q[4 * n + 1], d_q[4 * n + 2], d_q[4 * n + 3]);
      async_proxy_fence();
      barrier_arrive(shared.d_q_full);
      return;
    }
    if (block.block > 0) {
      barrier_wait(shared.sums_full, sums_phase);
      sums_phase ^= 1;
#pragma unroll
      for (int n = 0; n < kSums / 4; ++n) {
        const float4 before = *reinterpret_cast<const float4*>(place + n * 2048);
        d_q[4 * n] += before.x;
        d_q[4 * n + 1] += before.y;
        d_q[4 * n + 2] += before.z;
        d_q[4 * n + 3] += before.w;
      }
    }
    barrier_arrive(shared.d_q_full);
    const int column = (kTile == 128 ? 0 : group * (kDim / 2));
    store(d_q, a.scale, a.d_q, block.b, block.query_head(i),
          tile * kTile + (kTile == 128 ? group * 64 : 0), a.queries, column);
  }

  __device__ __forceinline__ void run(const KeyBlock<kDim>& block) {
    const int key = block.first_key + group * 64;
    const int count = block.count();
    const unsigned char* const k = shared.k + keys_at.stage * Shared::kKeyBytes;
    const unsigned char* const v = shared.v + keys_at.stage * Shared::kKeyBytes;
    barrier_wait(shared.keys_full + keys_at.stage, keys_at.phase);
    barrier_wait(shared.q_full + at.stage, at.phase);
    wgmma_fence();
    begin_scores(s, k, shared.q + at.stage * Shared::kTileBytes);
    float d_q[kSums];
    for (int i = 0;; ++i) {
      const unsigned char* const q = shared.q + at.stage * Shared::kTileBytes;
      const unsigned char* const d_out = shared.d_out + at.stage * Shared::kTileBytes;
      float d[kTile / 2];
      barrier_wait(shared.d_out_full + at.stage, at.phase);
      wgmma_fence();
      begin_scores(d, v, d_out);
      wgmma_wait<1>();
      wgmma_registers(s);
      make_probabilities(block.query_tile(i) * kTile, key);
      wgmma_wait<0>();
      wgmma_registers(d);
      make_score_gradients(d);
      std::uint32_t p[kTile / 16][4], g[kTile / 16][4];
      round(p, s);
      round(g, d);
      wgmma_fence();
      begin_sums(d_v, p, d_out, i > 0);
      unsigned char* const d_scores = shared.d_scores + d_scores_at * Shared::kScoreBytes;
      d_scores_at ^= 1;
      put_score_gradients(g, d_scores);
      async_proxy_fence();
      threads_sync(3, 256);
      wgmma_fence();
      begin_query_gradients(d_q, d_scores, k);
      begin_sums(d_k, g, q, i > 0);
      const RingCursor<Shared::kStages> now = at;
      at.advance();
      wgmma_wait<2>();
      release(shared.d_out_empty + now.stage);
      wgmma_wait<0>();
      wgmma_registers(d_q);
      wgmma_registers(d_k);
      wgmma_registers(d_v);
      release(shared.q_empty + now.stage);
      if (i + 1 == count) break;
      barrier_wait(shared.q_full + at.stage, at.phase);
      wgmma_fence();
      begin_scores(s, k, shared.q + at.stage * Shared::kTileBytes);
      put_query_gradients(d_q, block, i);
    }
    release(shared.keys_empty + keys_at.stage);
    keys_at.advance();
    put_query_gradients(d_q, block, count - 1);
  }

  // Stores the warpgroup's [64][2 N] times factor to rows of an output below `count`, from a column
  // on.
  template <int N>
  __device__ __forceinline__ void store(const float (&sum)[N], float factor,
                                        const AttentionRows& rows, int b, int head, int first,
                                        int count, int first_column) const {
    __nv_bfloat16* const to = rows.head<__nv_bfloat16>(b, head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row =
          first + static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + 8 * h;
      if (row >= count) continue;
      __nv_bfloat16* const place = to + row * rows.stride_t + first_column + threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < N / 4; ++n) {
        if (first_column + n * 8 < a.dim)
          *reinterpret_cast<std::uint32_t*>(place + n * 8) =
              bf16_pair(sum[4 * n + 2 * h] * factor, sum[4 * n + 2 * h + 1] * factor);
      }
    }
  }
};

// Maps: queries and d_out in boxes of kQueryTile rows, keys and values of 128. tickets: initially
// 0.
template <int kDim>
__global__ void __launch_bounds__(384, 1)
    attention_backward_kernel(const __grid_constant__ CUtensorMap q_map,
                              const __grid_constant__ CUtensorMap d_out_map,
                              const __grid_constant__ CUtensorMap k_map,
                              const __grid_constant__ CUtensorMap v_map,
                              const __grid_constant__ AttentionArguments a,
                              const AttentionOrder order, const BackwardScratch scratch,
                              unsigned* tickets) {
  using Shared = BackwardShared<kDim>;
  extern __shared__ __align__(1024) unsigned char backward_memory[];
  const Shared shared(backward_memory);
  shared.init_barriers();
  if (threadIdx.x < 128) {
    registers_shrink<40>();  // 128 x 40 + 256 x 232 registers are those that 384 threads start with
    if (threadIdx.x == 0) {
      load_backward<kDim>(shared, a, order, scratch, tickets, &q_map, &d_out_map, &k_map, &v_map);
    } else if (threadIdx.x == 32) {
      add_query_gradients<kDim>(shared, a, order, scratch);
    }
    return;
  }
  registers_grow<232>();
  BackwardGroup<kDim> work{a, shared, static_cast<int>(threadIdx.x) / 128 - 1};
  TicketReader tickets_read;
  for (int ticket; (ticket = tickets_read.next(shared, order.count())) >= 0;) {
    const KeyBlock<kDim> block(a, order, ticket);
    work.run(block);
    const int first = block.first_key + work.group * 64;
    work.store(work.d_k, a.scale, a.d_k, block.b, block.kv, first, a.keys, 0);
    work.store(work.d_v, 1.0f, a.d_v, block.b, block.kv, first, a.keys, 0);
  }
}

// Prepares each row's reference and delta, and clears the counters. kLanes = kDim / 8
// threads compute a row.
template <int kDim>
__global__ void __launch_bounds__(256)
    prepare_backward(const AttentionArguments a, const BackwardScratch scratch, int counters) {
  constexpr int kLanes = kDim / 8;
  const std::int64_t thread = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (thread < counters) scratch.counters[thread] = 0;
  const std::int64_t row = thread / kLanes;
  const int column = static_cast<int>(thread % kLanes) * 8;
  const int head = static_cast<int>(row / scratch.padded);
  const int t = static_cast<int>(row % scratch.padded);
  const bool there = head < a.batch * a.heads && t < a.queries;
  float sum = 0.0f;
  if (there && column < a.dim) {
    const int b = head / a.heads, h = head % a.heads;
    const uint4 x = *reinterpret_cast<const uint4*>(a.out.head<const __nv_bfloat16>(b, h) +
                                                    t * a.out.stride_t + column);
    const uint4 y = *reinterpret_cast<const uint4*>(a.d_out.head<const __nv_bfloat16>(b, h) +
                                                    t * a.d_out.stride_t + column);
    const std::uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = fmaf(__uint_as_float(xs[i] << 16), __uint_as_float(ys[i] << 16), sum);
      sum = fmaf(__uint_as_float(xs[i] & 0xffff0000u), __uint_as_float(ys[i] & 0xffff0000u), sum);
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (head >= a.batch * a.heads || thread % kLanes != 0) return;
  const float lse = there ? a.lse[static_cast<std::int64_t>(head) * a.queries + t] : -INFINITY;
  scratch.delta[row] = sum;
  scratch.reference[row] = lse == -INFINITY ? INFINITY : lse * kLog2OfE;
}

}  // namespace logitless::cuda

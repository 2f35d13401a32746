// Attention forward on Hopper: bf16, dim <= kDim, 64 or 128. A persistent, warp-specialised kernel.
//
// A CTA takes blocks of queries, 64 for each of its consumer warpgroups; one producer warp issues
// TMA loads. The keys that a block sees stream through in tiles of 128, the last first: only there
// are keys masked. A warpgroup holds its scores, probabilities and sums in registers. While it
// computes exponentials, its next scores and the other warpgroup's GEMMs keep the tensor cores
// busy.
#pragma once

#include "kernels/cuda/device/wgmma_sm90.cuh"
#include "kernels/cuda/tensor/attention/arguments.cuh"

namespace logitless::cuda {

inline constexpr int kKeyTile = 128;
inline constexpr int kGroups = 2;  // consumer warpgroups
inline constexpr float kLog2OfE = 1.4426950408889634f;
inline constexpr float kLnOf2 = 0.6931471805599453f;

// 2^x, 0 for -inf.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ std::uint32_t bf16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Reductions over the four lanes that share an accumulator row.
__device__ __forceinline__ float max_of_row(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float sum_of_row(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// Current stage of a ring of kStages buffers, and the parity of its rounds.
template <int kStages>
struct RingCursor {
  int stage = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Order in which CTAs take blocks. Heads form groups of as many heads as there are SMs: their
// operands stay in L2, and an SM gets blocks of all lengths. In a group the longest blocks come
// first, those of all heads before the next.
struct AttentionOrder {
  int heads;   // over the full batch
  int group;   // heads of a group
  int blocks;  // blocks of a head
  __host__ __device__ int count() const { return heads * blocks; }
  // `level`: rank of the block, 0 first.
  __device__ __forceinline__ void place(int index, int& head, int& level) const {
    const int first = index / (group * blocks) * group;
    const int local = index - first * blocks;
    const int width = min(group, heads - first);
    head = first + local % width;
    level = local / width;
  }
};

// A block of queries and its number of key tiles: one, fully masked, where it sees no key.
struct ForwardBlock {
  __device__ __forceinline__ ForwardBlock(const AttentionArguments& a, const AttentionOrder& order,
                                          int index, int queries) {
    int level;
    order.place(index, head, level);
    first = (order.blocks - 1 - level) * queries;
    tiles = (max(1, a.keys_before(min(first + queries, a.queries))) + kKeyTile - 1) / kKeyTile;
  }
  int head, first, tiles;
};

// Operands in shared memory are in atoms of 64 columns, each [rows][128 bytes], swizzled.
template <int kDim>
struct ForwardShared {
  static constexpr int kAtoms = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 2;
  static constexpr int kQueries = 64 * kGroups;
  static constexpr int kGroupBytes = 64 * kDim * 2;  // queries of a warpgroup
  static constexpr int kTileBytes = kKeyTile * kDim * 2;
  static constexpr int kBytes = 2 * kGroups * kGroupBytes + 2 * kStages * kTileBytes +
                                (4 + 2 * kGroups + 4 * kStages) * 8 + 1024;

  __device__ __forceinline__ explicit ForwardShared(unsigned char* raw)
      : q(reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) &
                                           ~std::uintptr_t{1023})),
        k(q + 2 * kGroups * kGroupBytes),
        v(k + kStages * kTileBytes),
        q_full(reinterpret_cast<std::uint64_t*>(v + kStages * kTileBytes)),
        q_empty(q_full + 2),
        k_full(q_empty + 2),
        k_empty(k_full + kStages),
        v_full(k_empty + kStages),
        v_empty(v_full + kStages),
        out_full(v_empty + kStages) {}
  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        barrier_init(q_full + i, 1);
        barrier_init(q_empty + i, 1);
        for (int group = 0; group < kGroups; ++group)
          barrier_init(out_full + i * kGroups + group, 128);
      }
      for (int i = 0; i < kStages; ++i) {
        barrier_init(k_full + i, 1);
        barrier_init(k_empty + i, 4 * kGroups);
        barrier_init(v_full + i, 1);
        barrier_init(v_empty + i, 4 * kGroups);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }
  unsigned char* q;  // [2 stages][kGroups]
  unsigned char* k;
  unsigned char* v;
  std::uint64_t *q_full, *q_empty, *k_full, *k_empty, *v_full, *v_empty;
  std::uint64_t* out_full;  // [2][kGroups]: results overwrite the queries
};

// Starts scores [64][128] = q . k^T without waiting for the wgmmas.
template <int kDim>
__device__ __forceinline__ void begin_scores(float (&s)[64], const unsigned char* q,
                                             const unsigned char* k) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int atom = step / 4, within = step % 4 * 32;
    wgmma<0, 0>(s, wgmma_descriptor(q + atom * 8192 + within, 16, 1024),
                wgmma_descriptor(k + atom * kKeyTile * 128 + within, 16, 1024), step > 0);
  }
  wgmma_commit();
}
// Starts out [64][kDim] (+)= p . v.
template <int kDim>
__device__ __forceinline__ void begin_values(float (&out)[kDim / 2], const std::uint32_t (&p)[8][4],
                                             const unsigned char* v, bool add) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step) {
    wgmma<1>(out, p[step], wgmma_descriptor(v + step * 2048, kKeyTile * 128, 1024),
             add || step > 0);
  }
  wgmma_commit();
}

// Online softmax of a thread's two rows.
struct ForwardSoftmax {
  float top[2] = {-INFINITY, -INFINITY};  // maximum of the unscaled scores
  float sum[2] = {0.0f, 0.0f};            // sums of the thread's columns
  float alpha[2];                         // factor that rescales the sums so far

  // Replaces scores by their exponentials.
  __device__ __forceinline__ void add(float (&s)[64], float log2_scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = top[h];
#pragma unroll
      for (int i = 0; i < 32; ++i) now = fmaxf(now, s[i / 2 * 4 + 2 * h + i % 2]);
      now = max_of_row(now);
      const float base = now == -INFINITY ? 0.0f : now * log2_scale;
      alpha[h] = power_of_two(fmaf(top[h], log2_scale, -base));
      float part[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& e = s[i / 2 * 4 + 2 * h + i % 2];
        e = power_of_two(fmaf(e, log2_scale, -base));
        part[i % 2] += e;
      }
      sum[h] = fmaf(sum[h], alpha[h], part[0] + part[1]);
      top[h] = now;
    }
  }
  // factor: normalises the rows' sums of values. `first`: the warpgroup's first query.
  __device__ __forceinline__ void finish(const AttentionArguments& a, int head, int first,
                                         float (&factor)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = sum_of_row(sum[h]);
      factor[h] = total == 0.0f ? 0.0f : 1.0f / total;
      const int row =
          first + static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + 8 * h;
      const float lse = total == 0.0f ? -INFINITY : fmaf(top[h], a.scale, log2f(total) * kLnOf2);
      if (threadIdx.x % 4 == 0 && row < a.queries)
        a.lse[static_cast<std::int64_t>(head) * a.queries + row] = lse;
    }
  }
};

__device__ __forceinline__ void round_scores(std::uint32_t (&p)[8][4], const float (&s)[64]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[step][i] = bf16_pair(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
  }
}

// A consumer warpgroup's block: 64 queries from `first` on of one head.
template <int kDim>
struct ForwardGroup {
  using Shared = ForwardShared<kDim>;
  const AttentionArguments& a;
  const Shared& shared;
  const int group;  // index in the CTA
  RingCursor<Shared::kStages> k_at, v_at;
  float out[kDim / 2];
  float s[64];
  std::uint32_t p[8][4];

  // Ping-pong scheduling: one warpgroup issues its wgmmas together, then the other.
  __device__ __forceinline__ void take_turn() const { threads_sync(kGroups + 2 + group, 256); }
  __device__ __forceinline__ void pass_turn() const {
    threads_arrive(kGroups + 2 + (1 - group), 256);
  }
  __device__ __forceinline__ void release(std::uint64_t* empty) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  }
  // Masks keys from `limit` of the upper or lower row on with -inf.
  __device__ __forceinline__ void hide(int key, const int (&limit)[2]) {
    const int left = key + static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (left + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITY;
    }
  }

  // Starts the scores of a block's last tile of keys.
  __device__ __forceinline__ void begin(const unsigned char* q) {
    barrier_wait(shared.k_full + k_at.stage, k_at.phase);
    wgmma_fence();
    begin_scores<kDim>(s, q, shared.k + k_at.stage * Shared::kTileBytes);
  }
  // Runs the mainloop from there to the sums of the values of all tiles.
  __device__ __forceinline__ void run(const unsigned char* q, int first, int tiles,
                                      ForwardSoftmax& softmax) {
    const float log2_scale = a.scale * kLog2OfE;
    const int row = first + static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    const int limit[2] = {min(a.keys, a.causal ? row + a.first_hidden() : a.keys),
                          min(a.keys, a.causal ? row + 8 + a.first_hidden() : a.keys)};
    const int all_see = min(a.keys, a.causal ? first + a.first_hidden() : a.keys);

    wgmma_wait<0>();
    wgmma_registers(s);
    release(shared.k_empty + k_at.stage);
    k_at.advance();
    if (tiles * kKeyTile > all_see) hide((tiles - 1) * kKeyTile, limit);
    softmax.add(s, log2_scale);
    round_scores(p, s);
    for (int tile = tiles - 2; tile >= 0; --tile) {
      barrier_wait(shared.k_full + k_at.stage, k_at.phase);
      take_turn();
      wgmma_fence();
      begin_scores<kDim>(s, q, shared.k + k_at.stage * Shared::kTileBytes);
      barrier_wait(shared.v_full + v_at.stage, v_at.phase);
      wgmma_fence();
      begin_values<kDim>(out, p, shared.v + v_at.stage * Shared::kTileBytes, tile < tiles - 2);
      pass_turn();
      wgmma_wait<1>();
      wgmma_registers(s);
      release(shared.k_empty + k_at.stage);
      k_at.advance();
      if ((tile + 1) * kKeyTile > all_see) hide(tile * kKeyTile, limit);
      softmax.add(s, log2_scale);
      wgmma_wait<0>();
      wgmma_registers(out);
      release(shared.v_empty + v_at.stage);
      v_at.advance();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) out[i] *= softmax.alpha[i / 2 % 2];
      round_scores(p, s);
    }
    barrier_wait(shared.v_full + v_at.stage, v_at.phase);
    wgmma_fence();
    begin_values<kDim>(out, p, shared.v + v_at.stage * Shared::kTileBytes, tiles > 1);
    wgmma_wait<0>();
    wgmma_registers(out);
    release(shared.v_empty + v_at.stage);
    v_at.advance();
  }

  // Stores the results to shared memory, over the queries. Control flow is uniform, since the next
  // wgmmas are in flight.
  __device__ __forceinline__ void store(unsigned char* box, const float (&factor)[2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = static_cast<int>(threadIdx.x % 128 / 32 * 16) + lane % 16;
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {
      std::uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pair[i] =
            bf16_pair(out[8 * c + 2 * i] * factor[i % 2], out[8 * c + 2 * i + 1] * factor[i % 2]);
      const int chunk = c % 4 * 2 + lane / 16;
      store_matrices(box + c / 4 * 8192 + row * 128 + ((chunk ^ (row & 7)) << 4), pair[0], pair[1],
                     pair[2], pair[3]);
    }
    async_proxy_fence();
  }
};

// Stores the results by TMA: one thread.
template <int kDim>
__device__ __forceinline__ void store_results(const ForwardShared<kDim>& shared,
                                              const AttentionArguments& a,
                                              const AttentionOrder& order,
                                              const CUtensorMap* out_map) {
  using Shared = ForwardShared<kDim>;
  RingCursor<2> at;
  for (int index = blockIdx.x; index < order.count(); index += gridDim.x) {
    const ForwardBlock block(a, order, index, Shared::kQueries);
    for (int group = 0; group < kGroups; ++group) {
      const int place = at.stage * kGroups + group;
      barrier_wait(shared.out_full + place, at.phase);
      for (int atom = 0; atom < Shared::kAtoms; ++atom) {
        tma_store_head(out_map, shared.q + place * Shared::kGroupBytes + atom * 8192, atom * 64,
                       block.first + group * 64, block.head % a.heads, block.head / a.heads);
      }
      tma_commit();
    }
    tma_wait_reads<0>();
    barrier_arrive(shared.q_empty + at.stage);
    at.advance();
  }
}

// Maps: queries and results in boxes of 64 rows, keys and values of 128.
template <int kDim>
__global__ void __launch_bounds__(384, 1)
    attention_forward_kernel(const __grid_constant__ CUtensorMap q_map,
                             const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map,
                             const __grid_constant__ CUtensorMap out_map,
                             const __grid_constant__ AttentionArguments a,
                             const AttentionOrder order) {
  using Shared = ForwardShared<kDim>;
  extern __shared__ unsigned char shared_memory[];
  const Shared shared(shared_memory);
  shared.init_barriers();
  RingCursor<2> q_at;
  if (threadIdx.x < 128) {
    registers_shrink<40>();
    if (threadIdx.x == 32) store_results<kDim>(shared, a, order, &out_map);
    if (threadIdx.x != 0) return;
    RingCursor<Shared::kStages> at;
    for (int index = blockIdx.x; index < order.count(); index += gridDim.x) {
      const ForwardBlock block(a, order, index, Shared::kQueries);
      const int b = block.head / a.heads, h = block.head % a.heads;
      const int kv = h / (a.heads / a.kv_heads);
      barrier_wait(shared.q_empty + q_at.stage, q_at.phase ^ 1);
      barrier_expect(shared.q_full + q_at.stage, kGroups * Shared::kGroupBytes);
      for (int i = 0; i < kGroups * Shared::kAtoms; ++i) {
        tma_load_head(shared.q + q_at.stage * kGroups * Shared::kGroupBytes + i * 8192, &q_map,
                      shared.q_full + q_at.stage, i % Shared::kAtoms * 64,
                      block.first + i / Shared::kAtoms * 64, h, b);
      }
      q_at.advance();
      for (int tile = block.tiles - 1; tile >= 0; --tile) {
        const auto load = [&](unsigned char* to, const CUtensorMap* map, std::uint64_t* full,
                              std::uint64_t* empty) {
          barrier_wait(empty + at.stage, at.phase ^ 1);
          barrier_expect(full + at.stage, Shared::kTileBytes);
          for (int atom = 0; atom < Shared::kAtoms; ++atom) {
            tma_load_head(to + at.stage * Shared::kTileBytes + atom * kKeyTile * 128, map,
                          full + at.stage, atom * 64, tile * kKeyTile, kv, b);
          }
        };
        load(shared.k, &k_map, shared.k_full, shared.k_empty);
        load(shared.v, &v_map, shared.v_full, shared.v_empty);
        at.advance();
      }
    }
    return;
  }
  registers_grow<232>();
  ForwardGroup<kDim> work{a, shared, static_cast<int>(threadIdx.x) / 128 - 1};
  if (work.group == 1) work.pass_turn();
  const auto queries = [&] {
    return shared.q + (q_at.stage * kGroups + work.group) * Shared::kGroupBytes;
  };
  wgmma_registers(work.out);  // initialises the accumulators before wgmmas are in flight
  barrier_wait(shared.q_full + q_at.stage, q_at.phase);
  work.take_turn();
  work.begin(queries());
  work.pass_turn();
  for (int index = blockIdx.x;; index += gridDim.x) {
    const ForwardBlock block(a, order, index, Shared::kQueries);
    const int first = block.first + work.group * 64;
    unsigned char* const q = queries();
    std::uint64_t* const out_full = shared.out_full + q_at.stage * kGroups + work.group;
    ForwardSoftmax softmax;
    work.run(q, first, block.tiles, softmax);
    q_at.advance();
    const auto finish = [&] {
      float factor[2];
      softmax.finish(a, block.head, first, factor);
      work.store(q, factor);
      barrier_arrive(out_full);
    };
    if (index + static_cast<int>(gridDim.x) >= order.count()) {
      finish();
      break;
    }
    // The next block's first scores overlap with the epilogue of this one.
    barrier_wait(shared.q_full + q_at.stage, q_at.phase);
    work.take_turn();
    work.begin(queries());
    work.pass_turn();
    finish();
  }
}

}  // namespace logitless::cuda

// The two gradient GEMMs of the head, in one persistent launch over one block of the gradient of
// the logits (or of exp(z)): d_hidden = block . weight and d_weight = block^T . hidden.
//
// Tiles of d_hidden are few and long, since they contract the full vocabulary block; tiles of
// d_weight are many and short. A static schedule gives each cluster its tiles of d_hidden first.
// Clusters with one less, or none, meanwhile work on d_weight; in the end all do.
#pragma once

#include "kernels/cuda/head/gradient_tiles_sm90.cuh"
#include "kernels/cuda/head/target_rows_sm90.cuh"

namespace logitless::cuda {

// Returns the first index of [from, end) whose bit is set, or end.
__device__ __forceinline__ int next_selected(const std::uint32_t* bits, int from, int end) {
  while (from < end) {
    const std::uint32_t rest = __ldg(bits + from / 32) >> (from % 32);
    if (rest != 0) return min(end, from + __ffs(static_cast<int>(rest)) - 1);
    from = from / 32 * 32 + 32;
  }
  return end;
}

// First step of a d_hidden tile, and its number of steps: 0 where all its tokens are ignored.
__device__ __forceinline__ int first_step(const GradientArguments& a, int pair) {
  return pair / a.hidden_pairs * a.hidden.steps;
}
__device__ __forceinline__ int hidden_steps(const GradientArguments& a, int pair) {
  if (a.active != nullptr && a.active[pair % a.hidden_pairs] == 0) return 0;
  return min(a.hidden.steps, a.hidden_steps - first_step(a, pair));
}
// Returns true if a step of d_weight has a token that is not ignored.
__device__ __forceinline__ bool step_active(const GradientArguments& a, int k) {
  return a.active == nullptr || a.active[k * kStep / kClusterRows] != 0;
}

// Calls f(step) for the steps of a tile that are loaded, in order. The far field (block-sparse) has
// 4 steps for each selected group of entries (d_hidden) or block of tokens (d_weight).
template <bool kHidden, bool kFar, typename F>
__device__ __forceinline__ void for_steps(const GradientArguments& a, int pair, const F& f) {
  if constexpr (kFar) {
    constexpr int kSteps = kClusterRows / kStep;
    const FarVocabBlockArguments& far = a.far;
    const int first = kHidden ? far.first_group : 0;
    const int end = kHidden ? first + (a.hidden.steps + kSteps - 1) / kSteps : far.blocks;
    const std::uint32_t* const bits =
        kHidden ? far.block_groups + pair * far.group_bits
                : far.group_blocks + (far.first_group + pair) * far.block_bits;
    for (int at = next_selected(bits, first, end); at < end;
         at = next_selected(bits, at + 1, end)) {
      for (int j = 0; j < kSteps; ++j) f((at - first) * kSteps + j);
    }
  } else if constexpr (kHidden) {
    const int begin = first_step(a, pair);
    const int steps = hidden_steps(a, pair);
    for (int k = begin; k < begin + steps; ++k) f(k);
  } else {
    const int steps = weight_steps(a);
    for (int k = 0; k < steps; ++k) {
      if (step_active(a, k)) f(k);
    }
  }
}

// Mainloop of a consumer: multiplies the stages of one tile. Returns false if there are none; z is
// then unchanged and stands for 0.
template <typename T, bool kHidden, bool kFar>
__device__ __forceinline__ bool multiply(const TileMemory& memory, StageCursor& at,
                                         const GradientArguments& a, int pair, float (&z)[128]) {
  const int consumer = threadIdx.x / 128 - 1;
  const int lane = threadIdx.x % 32;
  int previous = -1;
  for_steps<kHidden, kFar>(a, pair, [&](int) {
    barrier_wait(memory.full + at.stage, at.phase);
    const unsigned char* r = memory.rows + at.stage * kRowBytes + consumer * (kRowBytes / 2);
    const unsigned char* c = memory.columns + at.stage * kColumnBytes;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j) {
      // MN-major operands: the next 64 elements are 8192 bytes on, the next 8 of k 1024.
      const std::uint64_t columns = wgmma_descriptor(c + j * 2048, 8192, 1024);
      if constexpr (kHidden) {
        wgmma_m64n256k16<0, 1, T>(z, wgmma_descriptor(r + j * 32, 16, 1024), columns,
                                  previous >= 0 || j > 0);
      } else {
        wgmma_m64n256k16<1, 1, T>(z, wgmma_descriptor(r + j * 2048, 8192, 1024), columns,
                                  previous >= 0 || j > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
    previous = at.stage;
    at.advance();
  });
  wgmma_wait<0>();
  if (previous >= 0 && lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
  return previous >= 0;
}

// Epilogue: value = GEMM * factor[row] (d_hidden) + row part * column part.
template <bool kHidden, bool kRankOne>
__device__ __forceinline__ void finish_gemm(float (&z)[128], const GradientArguments& a, int row,
                                            int column) {
  const GemmArguments& p = kHidden ? a.hidden : a.weight;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    if constexpr (kHidden) {
      const float factor = r < p.rows ? p.factor[r] : 0.0f;
#pragma unroll
      for (int i = 0; i < 64; ++i) z[i / 2 * 4 + 2 * h + i % 2] *= factor;
    }
    if (r >= p.rows) continue;
    if constexpr (kRankOne) {
      if (p.column_part != nullptr) {
        const float share = p.row_part == nullptr ? 1.0f : p.row_part[r * p.row_part_stride];
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          const int c = column + i / 2 * 8 + i % 2;
          if (c < p.columns) z[i / 2 * 4 + 2 * h + i % 2] += share * p.column_part[c];
        }
      }
    }
  }
}

// Producer's loads of one tile. `block`: BlockMaps for d_hidden, which contracts all entries; for
// d_weight the map of its own range.
//
// Tiles of d_hidden are paced in stretches; `stretch` is the first of the tile, and `clusters` have
// such a tile.
template <bool kHidden, bool kFar, bool kSums, typename Block>
__device__ __forceinline__ void load_tile(const Pace& pace, int stretch, int clusters,
                                          const TileMemory& memory, StageCursor& at,
                                          const Block* block, const CUtensorMap* other,
                                          const CUtensorMap* out, const GradientArguments& a,
                                          int tile) {
  const GemmArguments& p = kHidden ? a.hidden : a.weight;
  const int rank = cluster_rank();
  const int pair = tile / p.column_tiles;
  const int row = ((kHidden ? pair % a.hidden_pairs : pair) * kClusterCtas + rank) * kTileRows;
  const int column = tile % p.column_tiles * kTileColumns + rank * (kTileColumns / 2);
  constexpr bool kPaced = kHidden && !kFar;
  const bool sums = !kHidden && kSums && a.sums.running.from == SumsFrom::sums;
  if (sums)
    prefetch_sums(a.sums, out, pair * kClusterCtas + rank, tile % p.column_tiles, p.column_tiles);
  const int begin = kPaced ? first_step(a, pair) : 0;
  for_steps<kHidden, kFar>(a, pair, [&](int k) {
    if (kPaced && (k - begin) % kStretch == 0) {
      const int now = (k - begin) / kStretch;
      if (now > 0) pace.loaded(stretch + now - 1);
      if (now > 1) pace.wait(stretch + now - 2, clusters);
    }
    std::uint64_t* const full = memory.full + at.stage;
    barrier_wait(memory.empty + at.stage, at.phase ^ 1);
    barrier_expect(full, kStageBytes);
    unsigned char* const rows = memory.rows + at.stage * kRowBytes;
    if constexpr (kHidden) {
      block->at(k * kStep, [&](const CUtensorMap* map, int vocab_id) {
        tma_load(rows, map, full, vocab_id, row);
      });
    } else {
      tma_load(rows, block, full, row, k * kStep);
      tma_load(rows + 8192, block, full, row + 64, k * kStep);
    }
    unsigned char* const columns =
        memory.columns + at.stage * kColumnBytes + rank * (kColumnBytes / 2);
    tma_load_multicast(columns, other, full, column, k * kStep, (1 << kClusterCtas) - 1);
    tma_load_multicast(columns + 8192, other, full, column + 64, k * kStep,
                       (1 << kClusterCtas) - 1);
    at.advance();
  });
  if (sums && stages_sums(a.sums, p.rows, p.columns, pair, tile % p.column_tiles))
    load_sums(memory, at, a.sums, out, pair * kClusterCtas + rank, tile % p.column_tiles,
              p.column_tiles);
  const int steps = kPaced ? hidden_steps(a, pair) : 0;
  if (kPaced && steps < p.steps) {  // others may wait for stretches that this tile lacks
    const int made = max(stretches_of(steps) - 1, 0);
    for (int k = (made + 1) * kStretch; k < p.steps; k += kStretch)
      pace.loaded(stretch + k / kStretch - 1);
  }
}

// Epilogue of d_weight in the far field: adds share times the tile's gradient, and the rank-one
// part.
template <bool kRankOne>
__device__ __forceinline__ void finish_vocab(float (&z)[128], const GradientArguments& a, int row,
                                             int column) {
  const GemmArguments& p = a.weight;
  if (row >= p.rows) return;
  const float shares[2] = {a.far.share[row], row + 8 < p.rows ? a.far.share[row + 8] : 0.0f};
  add_floats(z, shares, a.far.tile_gradient + std::int64_t{row / 128} * p.columns, column,
             p.columns);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    if (r >= p.rows) continue;
    if constexpr (kRankOne) {
      if (p.column_part != nullptr)
        add_floats(z, h, p.row_part == nullptr ? 1.0f : p.row_part[r], p.column_part, column,
                   p.columns);
    }
  }
}

// Scatters to the rows of the vocabulary entries from registers, since a TMA store needs adjacent
// rows. Four threads write 32 bytes of a row.
__device__ __forceinline__ void put_words(float (&z)[128], const GradientArguments& a, int row,
                                          int column) {
  const GemmArguments& p = a.weight;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    if (r >= p.rows) continue;
    const std::int64_t first = a.far.order_vocab[r] * a.far.stride;
    if (p.narrow) {
      auto* const to = static_cast<__nv_bfloat16*>(a.far.d_weight) + first;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int c = column + i * 8;
        if (c < p.columns)
          *reinterpret_cast<__nv_bfloat162*>(to + c) =
              __floats2bfloat162_rn(z[4 * i + 2 * h], z[4 * i + 2 * h + 1]);
      }
    } else {
      auto* const to = static_cast<float*>(a.far.d_weight) + first;
      if (p.add) add_floats(z, h, 1.0f, to, column, p.columns);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int c = column + i * 8;
        if (c < p.columns)
          *reinterpret_cast<float2*>(to + c) = make_float2(z[4 * i + 2 * h], z[4 * i + 2 * h + 1]);
      }
    }
  }
}

template <typename T, bool kHidden, bool kRankOne, bool kEntries, bool kFar, bool kSums>
__device__ __forceinline__ void make_tile(const TileMemory& memory, TileWriter& writer,
                                          StageCursor& at, const CUtensorMap* out,
                                          const GradientArguments& a, int tile) {
  const GemmArguments& p = kHidden ? a.hidden : a.weight;
  const int pair = tile / p.column_tiles;
  const int row = (pair * kClusterCtas + cluster_rank()) * kTileRows;
  const int column = tile % p.column_tiles * kTileColumns;
  float z[128];
  constexpr bool kAdds = kHidden || kEntries;
  using Targets = std::conditional_t<kAdds, TargetRows<T, kHidden, kFar>, NoTargetRows>;
  const Targets targets(a, row + accumulator_row() - static_cast<int>(threadIdx.x % 32 / 4));
  const bool any = multiply<T, kHidden, kFar>(memory, at, a, pair, z);
  if (kFar && !any) return;  // d_hidden is accumulated; for d_weight see put_far_vocab
#pragma unroll
  for (int i = 0; i < 128; ++i) z[i] = any ? z[i] : 0.0f;
  if constexpr (std::is_same_v<T, __half> && !kHidden) {
    const float unscale = a.weight_unscale == nullptr ? 1.0f : *a.weight_unscale;
#pragma unroll
    for (int i = 0; i < 128; ++i) z[i] *= unscale;
  }
  if constexpr (kFar && !kHidden) {
    finish_vocab<kRankOne>(z, a, row + accumulator_row(), column + accumulator_column());
    if constexpr (kAdds) targets.add_to(z, a, writer.memory_of_warp(), column);
    return put_words(z, a, row + accumulator_row(), column + accumulator_column());
  }
  const bool whole = row + kTileRows <= p.rows && column + kTileColumns <= p.columns;
  const auto sums_of = [&] {
    return TileSums(a.sums, p.rows, p.columns, row / kTileRows, column / kTileColumns,
                    p.column_tiles);
  };
  if constexpr (!kHidden && kSums) {
    if (stages_sums(a.sums, p.rows, p.columns, pair, column / kTileColumns)) {
      add_staged<T>(z, memory, at);
    } else {
      add_running<T>(z, a.sums, sums_of(), whole);
    }
  }
  if (!kHidden || a.hidden.row_pairs == a.hidden_pairs) {  // with split-K add_parts does it
    finish_gemm<kHidden, kRankOne>(z, a, row + accumulator_row(), column + accumulator_column());
    if constexpr (kAdds) targets.add_to(z, a, writer.memory_of_warp(), column);
  }
  const int first_row = row + (threadIdx.x / 128 - 1) * 64;
  if constexpr (!kHidden && kSums) {
    if (a.sums.running.last) {
      writer.put_narrow<T>(z, out, column, first_row);
    } else {
      put_running<T>(z, writer, sums_of(), whole, out, column, first_row);
    }
  } else if (p.narrow) {
    writer.put_narrow<T>(z, out, column, first_row);
  } else {
    writer.put_f32(z, out, column, first_row, p.add);
  }
}

// Sums the split-K parts of d_hidden, with the epilogue of finish_gemm. A thread block for each
// token.
template <typename T, typename Out>
__global__ void __launch_bounds__(128)
    add_parts(const GradientArguments a, const float* parts, int columns, Out* out,
              std::int64_t stride, bool add) {
  const int row = static_cast<int>(blockIdx.x);
  const int count = a.hidden.row_pairs / a.hidden_pairs;
  const std::int64_t part = static_cast<std::int64_t>(a.hidden_pairs) * kClusterRows * columns;
  const float factor = a.hidden.factor[row];
  const bool smooths = a.hidden.column_part != nullptr;
  const float share = smooths ? a.hidden.row_part[row * a.hidden.row_part_stride] : 0.0f;
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += 128) {
    float value = 0.0f;
    for (int p = 0; p < count; ++p)
      value += parts[p * part + static_cast<std::int64_t>(row) * columns + c];
    value *= factor;
    if (smooths) value = fmaf(share, a.hidden.column_part[c], value);
    for (int k = 0; k < a.targets_per_token; ++k) {
      const int slot = row * a.targets_per_token + k;
      const float coefficient = a.coefficient[slot];
      if (coefficient == 0.0f) continue;
      const T* const rows = static_cast<const T*>(a.weight_rows);
      value =
          fmaf(coefficient,
               as_float(rows[(a.vocab_ids[slot] - a.vocab_begin) * a.weight_stride + c]), value);
    }
    Out& to = out[row * stride + c];
    if constexpr (sizeof(Out) == 2) {
      to = rounded<Out>(value);  // add never happens here, see sums_hidden
    } else {
      to = add ? to + value : value;
    }
  }
}

// kRankOne: some output has a column part. kEntries: the epilogue adds the targets to d_weight; for
// fp32, add_weight_targets does so afterwards in a tenth of the time.
//
// Maps: the block in boxes of 128 tokens x 64 entries and of 64 tokens x 64 entries; weight and
// hidden in boxes of 64 x 64; the outputs in boxes of 64 rows x 128 bytes.
//
// kFar: a vocabulary block of the far field. kSums: d_weight is added to running sums, or becomes
// one. It is a separate kernel, since its registers would cost the others a tenth of their
// throughput. T: bf16, or f16 without the far field.
template <typename T, bool kRankOne, bool kEntries, bool kFar, bool kSums>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kTileThreads, 1)
    gradient_tiles(const __grid_constant__ BlockMaps block_rows,
                   const __grid_constant__ CUtensorMap block_columns,
                   const __grid_constant__ CUtensorMap weight,
                   const __grid_constant__ CUtensorMap hidden,
                   const __grid_constant__ CUtensorMap d_hidden,
                   const __grid_constant__ CUtensorMap d_weight,
                   const __grid_constant__ GradientArguments a) {
  if (kFar && a.far.list_begin[0] == a.far.list_begin[a.far.groups]) return;
  extern __shared__ unsigned char shared_memory[];
  const TileMemory memory(shared_memory);
  memory.init_barriers();
  const int clusters = gridDim.x / kClusterCtas;
  const int cluster = blockIdx.x / kClusterCtas;
  TileSchedule schedule(a, kFar, cluster, clusters);
  bool is_hidden;
  int tile;
  StageCursor at;
  if (threadIdx.x < 128) {
    registers_shrink<40>();
    if (threadIdx.x == 0) {
      const Pace pace(a.paced ? a.pace : nullptr);
      const int of_hidden = hidden_tiles(a);
      const int stretches = stretches_of(a.hidden.steps);
      const int first_late = (of_hidden + clusters - 1) / clusters * stretches;
      int round = 0;  // rounds of d_hidden
      int late = 0;   // rounds in which all clusters take part
      while (schedule.next(is_hidden, tile)) {
        if (is_hidden) {
          load_tile<true, kFar, false>(pace, round * stretches,
                                       min(clusters, of_hidden - round * clusters), memory, at,
                                       &block_rows, &weight, nullptr, a, tile);
          ++round;
          continue;
        }
        const bool paced = tile >= schedule.early_tiles();
        if (paced && late > 1) pace.wait(first_late + late - 2, clusters);
        load_tile<false, kFar, kSums>(pace, 0, 0, memory, at, &block_columns, &hidden, &d_weight, a,
                                      tile);
        if (paced) pace.loaded(first_late + late++);
      }
    }
  } else {
    registers_grow<232>();
    TileWriter writer(memory);
    while (schedule.next(is_hidden, tile) || schedule.next_empty(a, is_hidden, tile)) {
      if (is_hidden) {
        make_tile<T, true, kRankOne, kEntries, kFar, false>(memory, writer, at, &d_hidden, a, tile);
      } else {
        make_tile<T, false, kRankOne, kEntries, kFar, kSums>(memory, writer, at, &d_weight, a,
                                                             tile);
      }
    }
    writer.drain();
  }
  cluster_sync();
}

using GradientTiles = void (*)(BlockMaps, CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap,
                               CUtensorMap, GradientArguments);
// Returns the kernel of dense blocks. sums: with running sums, whose entries are always listed.
template <typename T>
GradientTiles dense_tiles_of(bool rank_one, bool entries, bool sums) {
  if (sums)
    return rank_one ? gradient_tiles<T, true, true, false, true>
                    : gradient_tiles<T, false, true, false, true>;
  if (entries)
    return rank_one ? gradient_tiles<T, true, true, false, false>
                    : gradient_tiles<T, false, true, false, false>;
  return rank_one ? gradient_tiles<T, true, false, false, false>
                  : gradient_tiles<T, false, false, false, false>;
}
// Those of f16, which are compiled in a file of their own.
GradientTiles f16_tiles_of(bool rank_one, bool entries, bool sums);

}  // namespace logitless::cuda

// Persistent forward kernel of the head on Hopper. The mainloop computes the logits of a tile of
// 128 tokens x 256 vocabulary entries in registers, and logit_epilogue.cuh reduces them there.
//
// The CTAs of a cluster have two tiles of tokens and one of the vocabulary. For few tokens they
// have the same tokens, at most 192, and two tiles of the vocabulary. They share the hidden states
// then instead of the weights. A row of a tile has the same bits either way.
#pragma once

#include "kernels/cuda/device/tiles_sm90.cuh"
#include "kernels/cuda/device/wgmma_sm90.cuh"
#include "kernels/cuda/head/logit_epilogue.cuh"

namespace logitless::cuda {

// A warp has 16 rows of a tile, and four lanes share a row, see accumulator_row.
struct HopperPosition : TilePosition {
  __device__ __forceinline__ HopperPosition(const ForwardArguments& a, std::int64_t token,
                                            const Tile& tile)
      : TilePosition(a, token, tile, accumulator_column()) {}
  static constexpr int kRows = 2;
  static constexpr int kColumns = 64;
  static constexpr int kHalves = 2;
  static constexpr int kSegments = 4;
  static __device__ __forceinline__ constexpr int segment(int s) { return s; }
  static __device__ __forceinline__ constexpr int reg(int h, int i) {
    return i / 2 * 4 + 2 * h + i % 2;
  }
  static __device__ __forceinline__ constexpr int column(int i) { return i / 2 * 8 + i % 2; }
  static __device__ __forceinline__ constexpr int half(int i) { return i / 32; }
  __device__ __forceinline__ std::int64_t token(int h) const { return row + 8 * h; }
  // First of the four lanes that share a row.
  __device__ __forceinline__ bool writes() const { return threadIdx.x % 4 == 0; }
  __device__ __forceinline__ float row_total(float part, int) const { return quad_sum(part); }
  __device__ __forceinline__ void readers_done() const { __syncwarp(); }
  __device__ __forceinline__ void put_sum(RowSum, float* to, float part, int h) const {
    part = quad_sum(part);
    if (writes()) to[out + 8 * h] = part;
  }
  __device__ __forceinline__ void put_greatest(const ForwardArguments& a, float top, int h) const {
    if (writes()) a.best[out + 8 * h] = top;
  }
  __device__ __forceinline__ void put_best(const ForwardArguments& a, float top, int index,
                                           int h) const {
    if (!writes()) return;
    a.best[out + 8 * h] = top;
    a.best_index[out + 8 * h] = index;
  }
  // Writes the masses of a token in the two halves of a tile.
  __device__ __forceinline__ void put_masses(const ForwardArguments& a, const float (&halves)[2],
                                             int h) const {
    const float low = quad_sum(halves[0]);
    const float high = quad_sum(halves[1]);
    if (!writes()) return;
    const std::int64_t at = 2 * (out - row) + token(h);
    a.masses[at] = low;
    a.masses[at + a.padded_tokens] = high;
  }
};

// Layout of a launch: kFew is 0, or the consumer warpgroups of a CTA that has all tokens of the
// launch, kConsumerTokens in each. kMostFew leaves a thread 160 registers.
inline constexpr int kConsumerTokens = 64;
inline constexpr int kMostFew = 3;
template <int kFew>
struct ForwardLayout {
  static constexpr int kConsumers = kFew == 0 ? 2 : kFew;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = kConsumerTokens * kConsumers;
  static constexpr int kRowBytes = kRows * kStep * 2;  // one stage of the hidden states
  static constexpr int kStageBytes = kRowBytes + kColumnBytes;
  // No tile of few tokens is stored.
  static constexpr int kBoxBytes = kFew == 0 ? 2 * kBoxesPerConsumer * cuda::kBoxBytes : 0;
  static constexpr int kShared = kStages * kStageBytes + kBoxBytes + 2 * kStages * 8 + 1024;
  // Registers of a thread, of 65536 in all. One consumer needs no more than its share.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr bool kMovesRegisters = kConsumers > 1;
};
static_assert(ForwardLayout<0>::kThreads == kTileThreads);
static_assert(ForwardLayout<0>::kShared == kTileShared);

// Returns how many tokens launch_few takes, 0 to 192: all of them, or those after the last 256,
// where that takes less time. Their tiles are not stored.
std::int64_t few_tokens(ForwardMode mode, bool store, const TileOperands& operands,
                        const ForwardArguments& arguments);
// Enqueues the tiles of the last `tokens`.
void launch_few(ForwardMode mode, const TileOperands& operands, std::int64_t tokens,
                const ForwardArguments& arguments, Stream stream);

// z (+)= x . w^T for 16 columns of 64 tokens and 256 vocabulary entries, whose rows are 1024 bytes
// for eight. Three consumers begin with 128 registers, too few for a wgmma of 256 entries, though
// they get more. Two of 128 give the same bits.
template <typename T, int kConsumers>
__device__ __forceinline__ void multiply_step(float (&z)[128], const unsigned char* x,
                                              const unsigned char* w, int add) {
  const std::uint64_t tokens = wgmma_descriptor(x, 16, 1024);
  if constexpr (kConsumers < 3) {
    wgmma_m64n256k16<0, 0, T>(z, tokens, wgmma_descriptor(w, 16, 1024), add);
  } else {
    using Half = float[64];
    wgmma<0, 0, T>(reinterpret_cast<Half&>(z[0]), tokens, wgmma_descriptor(w, 16, 1024), add);
    wgmma<0, 0, T>(reinterpret_cast<Half&>(z[64]), tokens,
                   wgmma_descriptor(w + kColumnBytes / 2, 16, 1024), add);
  }
}

// Returns a CTA's tile from its cluster's.
template <int kFew>
__device__ __forceinline__ Tile tile_of_cta(Tile tile, int rank) {
  if (kFew > 0) tile.vocab_id = tile.vocab_id * kClusterCtas + rank;
  return tile;
}

template <typename T, ForwardMode kMode, bool kStore, int kFew>
__global__ void __cluster_dims__(kClusterCtas, 1, 1)
    __launch_bounds__(ForwardLayout<kFew>::kThreads, 1)
        forward_tiles(const __grid_constant__ CUtensorMap hidden,
                      const __grid_constant__ CUtensorMap weight,
                      const __grid_constant__ BlockMaps block, const ForwardArguments a) {
  if (a.wanted != nullptr && a.wanted[a.token_pairs] == 0) return;
  using Layout = ForwardLayout<kFew>;
  extern __shared__ unsigned char shared_memory[];
  const TileMemory memory(shared_memory, Layout::kRowBytes, Layout::kBoxBytes);
  memory.init_barriers(Layout::kConsumers);
  const int rank = cluster_rank();
  const int cluster = blockIdx.x / kClusterCtas;
  const int clusters = gridDim.x / kClusterCtas;
  const int listed = a.list == nullptr ? 0 : a.list_begin[0];
  const int pairs = pairs_of(a);
  const int tiles = kFew > 0            ? pairs * ((a.vocab_tiles + 1) / kClusterCtas)
                    : a.list == nullptr ? pairs * a.vocab_tiles
                                        : a.list_begin[a.vocab_tiles] - listed;
  StageCursor at;
  if (threadIdx.x < 128) {
    if constexpr (Layout::kMovesRegisters) registers_shrink<Layout::kProducerRegisters>();
    if (threadIdx.x == 0) {
      const std::uint64_t keep = keep_policy();
      const std::uint64_t pass = pass_policy();
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = tile_of_cta<kFew>(tile_of(t + listed, a, pairs), rank);
        if (a.wanted != nullptr && a.wanted[tile.pair] == 0) continue;
        const int row =
            tile.pair * kClusterRows + rank * (kFew > 0 ? Layout::kRows / 2 : kTileRows);
        const int column = tile.vocab_id * kTileColumns;
        for (int k = 0; k < a.steps; ++k) {
          std::uint64_t* const full = memory.full + at.stage;
          barrier_wait(memory.empty + at.stage, at.phase ^ 1);
          barrier_expect(full, Layout::kStageBytes);
          unsigned char* const x = memory.rows + at.stage * Layout::kRowBytes;
          unsigned char* const w = memory.columns + at.stage * kColumnBytes;
          constexpr int kHalf = kTileColumns / 2, kBoth = (1 << kClusterCtas) - 1;
          if constexpr (kFew > 0) {
            tma_load_multicast(x + rank * (Layout::kRowBytes / 2), &hidden, full, k * kStep, row,
                               kBoth, keep);
            tma_load(w, &weight, full, k * kStep, column, pass);
            tma_load(w + kColumnBytes / 2, &weight, full, k * kStep, column + kHalf, pass);
          } else {
            tma_load(x, &hidden, full, k * kStep, row, keep);
            tma_load_multicast(w + rank * (kColumnBytes / 2), &weight, full, k * kStep,
                               column + rank * kHalf, kBoth, pass);
          }
          at.advance();
        }
      }
    }
  } else {
    if constexpr (Layout::kMovesRegisters) registers_grow<Layout::kConsumerRegisters>();
    const int consumer = threadIdx.x / 128 - 1;
    const int lane = threadIdx.x % 32;
    TileWriter writer(memory);
    float z[128];
    for (int t = cluster; t < tiles; t += clusters) {
      const Tile tile = tile_of_cta<kFew>(tile_of(t + listed, a, pairs), rank);
      if (a.wanted != nullptr && a.wanted[tile.pair] == 0) continue;
      int previous = -1;
      for (int k = 0; k < a.steps; ++k) {
        barrier_wait(memory.full + at.stage, at.phase);
        const unsigned char* x =
            memory.rows + at.stage * Layout::kRowBytes + consumer * (kRowBytes / 2);
        const unsigned char* w = memory.columns + at.stage * kColumnBytes;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kStep / 16; ++j) {
          multiply_step<T, Layout::kConsumers>(z, x + j * 32, w + j * 32, k > 0 || j > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the GEMM step before is done with its stage
        if (previous >= 0 && lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
        previous = at.stage;
        at.advance();
      }
      wgmma_wait<0>();
      if (lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
      // The last cluster may have one tile.
      if (kFew > 0 && tile.vocab_id >= a.vocab_tiles) continue;
      const int row = tile.pair * kClusterRows + (kFew > 0 ? 0 : rank * kTileRows);
      const HopperPosition position(a, row + accumulator_row(), tile);
      finish_tile<kMode, kStore>(z, a, position);
      if constexpr (kStore) {
        if (tile.vocab_id < a.stored_tiles) {
          if (std::is_same_v<T, __half> && a.shifts != nullptr) shift_rows(z, a, position);
          writer.put_narrow<T>(z, &block, tile.vocab_id * kTileColumns, row + consumer * 64);
        }
      }
    }
    if constexpr (kStore) writer.drain();
  }
  cluster_sync();  // no CTA exits while the other may still signal it
}

}  // namespace logitless::cuda

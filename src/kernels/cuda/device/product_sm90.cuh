// GEMMs on Hopper whose epilogue the caller gives: one or two products in tiles of 128 x 256 fp32
// sums that stay in registers. Generated kernels include it (kernels/device/tile_engine.h), so it
// needs no header of the host.
#pragma once

#include "kernels/cuda/device/tiles_sm90.cuh"

namespace logitless::cuda {

// The sums of a tile:
//   one: a . b, 256 columns
//   beside: a . b in columns [0, 128) of a tile and a . d in the others: columns of equal index
//   difference: a . b - c . d, 256 columns
enum class Products { one, beside, difference };

// Maps of a [m, k] and c, boxes of kTileRows rows; and of b^T [n, k] and d^T, boxes of
// kTileColumns / 2 rows, or with kTransposeB of b [k, n] and d, boxes of kStep rows. Elements
// outside are 0. Operands that a product does not have are null.
struct ProductMaps {
  const CUtensorMap *a, *b, *c, *d;
};

// The tiles of a launch: pairs of row tiles, one pair for each cluster, column tiles, and steps of
// kStep along the contracted dimensions of a . b and c . d.
struct ProductTiles {
  int row_pairs, column_tiles, steps, other_steps;
};

// Columns of each result in a tile.
constexpr int columns_of(Products products) {
  return products == Products::beside ? kTileColumns / 2 : kTileColumns;
}

// Tile t of a cluster. Clusters that run at a time have tiles of kGroup pairs of rows and of as
// many columns, so that operands come from L2.
struct ProductTile {
  static constexpr int kGroup = 8;
  __device__ __forceinline__ ProductTile(int t, const ProductTiles& of) {
    const int group = t / (kGroup * of.column_tiles), first = group * kGroup;
    const int pairs = of.row_pairs - first < kGroup ? of.row_pairs - first : kGroup;
    const int inside = t - first * of.column_tiles;
    pair = first + inside % pairs;
    column = inside / pairs;
  }
  int pair, column;
};

// Producer: loads the operands of all tiles of the cluster.
template <int kTransposeB, Products kProducts>
__device__ __forceinline__ void load_products(const TileMemory& memory, const ProductMaps& maps,
                                              const ProductTiles& of) {
  constexpr int kHalf = kTileColumns / 2, kBoth = (1 << kClusterCtas) - 1;
  const int rank = cluster_rank();
  const std::uint64_t keep = keep_policy(), pass = pass_policy();
  StageCursor at;
  for (int t = blockIdx.x / kClusterCtas; t < of.row_pairs * of.column_tiles;
       t += gridDim.x / kClusterCtas) {
    const ProductTile tile(t, of);
    const int row = (tile.pair * kClusterCtas + rank) * kTileRows;
    // The half of the column operand that this CTA loads for both.
    const int column =
        tile.column * columns_of(kProducts) + (kProducts == Products::beside ? 0 : rank * kHalf);
    for (int s = 0; s < of.other_steps + of.steps; ++s) {
      const bool other = s < of.other_steps;
      const int k = other ? s : s - of.other_steps;
      const CUtensorMap* const rows = other ? maps.c : maps.a;
      const bool second = kProducts == Products::beside ? rank == 1 : other;
      const CUtensorMap* const columns = second ? maps.d : maps.b;
      std::uint64_t* const full = memory.full + at.stage;
      barrier_wait(memory.empty + at.stage, at.phase ^ 1);
      barrier_expect(full, kStageBytes);
      tma_load(memory.rows + at.stage * kRowBytes, rows, full, k * kStep, row, keep);
      unsigned char* const half =
          memory.columns + at.stage * kColumnBytes + rank * (kColumnBytes / 2);
      if constexpr (kTransposeB == 0) {
        tma_load_multicast(half, columns, full, k * kStep, column, kBoth, pass);
      } else {
        // boxes of kStep rows of b x 64 columns
#pragma unroll
        for (int q = 0; q < kHalf / 64; ++q)
          tma_load_multicast(half + q * (kStep * 128), columns, full, column + 64 * q, k * kStep,
                             kBoth, pass);
      }
      at.advance();
    }
  }
}

// Consumer: the sums of one tile, with kAdd added to z.
template <typename T, int kTransposeB, bool kAdd>
__device__ __forceinline__ void multiply_tile(const TileMemory& memory, StageCursor& at, int steps,
                                              float (&z)[128]) {
  const int lane = threadIdx.x % 32;
  const int offset = (threadIdx.x / 128 - 1) * (kRowBytes / 2);
  int previous = -1;
  for (int k = 0; k < steps; ++k) {
    barrier_wait(memory.full + at.stage, at.phase);
    const unsigned char* a = memory.rows + at.stage * kRowBytes + offset;
    const unsigned char* b = memory.columns + at.stage * kColumnBytes;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j) {
      // With b transposed the next 64 columns are 8192 bytes on, the next 8 of k 1024.
      const std::uint64_t columns = kTransposeB == 0 ? wgmma_descriptor(b + j * 32, 16, 1024)
                                                     : wgmma_descriptor(b + j * 2048, 8192, 1024);
      wgmma_m64n256k16<0, kTransposeB, T>(z, wgmma_descriptor(a + j * 32, 16, 1024), columns,
                                          kAdd || k > 0 || j > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the step before is done with its stage
    if (previous >= 0 && lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
    previous = at.stage;
    at.advance();
  }
  wgmma_wait<0>();
  if (lane < kClusterCtas) barrier_arrive_at(memory.empty + previous, lane);
}

// z = -z, not before the wait for the sums.
__device__ __forceinline__ void negate(float (&z)[128]) {
#pragma unroll
  for (float& value : z) asm volatile("neg.f32 %0, %0;" : "+f"(value)::"memory");
}

// Stores results of a consumer warpgroup by TMA, 64 rows x 64 columns at a time, in boxes of 64
// rows x 128 bytes in shared memory. Maps have such boxes.
class BoxWriter {
 public:
  __device__ __forceinline__ explicit BoxWriter(const TileMemory& memory)
      : consumer_(threadIdx.x / 128 - 1),
        row_(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4),
        boxes_(memory.boxes + consumer_ * kBoxesPerConsumer * kBoxBytes) {}
  // pairs: two numbers of 16 bits each; pair 2 i + h has accumulators 4 i + 2 h and the next of a
  // thread's 32. (column, row): position of the first element.
  __device__ __forceinline__ void put(const unsigned (&pairs)[16], const CUtensorMap* map,
                                      int column, int row) {
    unsigned char* const box = begin();
#pragma unroll
    for (int p = 0; p < 16; ++p)
      *reinterpret_cast<unsigned*>(box + place(p / 2, p % 2, threadIdx.x % 4 * 4)) = pairs[p];
    end(map, box, column, row);
  }
  // Waits for the stores; call it before the CTA exits.
  __device__ __forceinline__ void drain() const {
    if (leads()) tma_wait_reads<0>();
  }

 private:
  __device__ __forceinline__ bool leads() const { return threadIdx.x % 128 == 0; }
  // Byte offset of 16-byte chunk `chunk` of the thread's row under the 128-byte swizzle.
  __device__ __forceinline__ int place(int chunk, int h, int byte) const {
    return (row_ + 8 * h) * 128 + ((chunk ^ (row_ & 7)) << 4) + byte;
  }
  __device__ __forceinline__ unsigned char* begin() const {
    if (leads()) tma_wait_reads<kBoxesPerConsumer - 1>();
    warpgroup_sync(consumer_ + 1);
    return boxes_ + next_ * kBoxBytes;
  }
  __device__ __forceinline__ void end(const CUtensorMap* map, const unsigned char* box, int x,
                                      int y) {
    next_ = (next_ + 1) % kBoxesPerConsumer;
    async_proxy_fence();
    warpgroup_sync(consumer_ + 1);
    if (!leads()) return;
    tma_store(map, box, x, y, policy_);
    tma_commit();
  }

  int consumer_, row_, next_ = 0;
  unsigned char* boxes_;
  std::uint64_t policy_ = pass_policy();
};

// Computes all tiles. Consumers call ahead(row, column) of a tile, for prefetches, and then
// epilogue(z, row, column, writer): z are a thread's sums, see accumulator_row(), of the tile that
// begins at that row and column of the results. Launch: kTileThreads threads, clusters of
// kClusterCtas, kTileShared bytes, any number of clusters.
template <typename T, int kTransposeB, Products kProducts, typename Ahead, typename Epilogue>
__device__ __forceinline__ void products_of_tiles(const ProductMaps& maps, const ProductTiles& of,
                                                  const Ahead& ahead, const Epilogue& epilogue) {
  extern __shared__ unsigned char shared_memory[];
  const TileMemory memory(shared_memory);
  memory.init_barriers();
  if (threadIdx.x < 128) {
    registers_shrink<40>();
    if (threadIdx.x == 0) load_products<kTransposeB, kProducts>(memory, maps, of);
  } else {
    registers_grow<232>();
    const int rank = cluster_rank();
    BoxWriter writer(memory);
    StageCursor at;
    float z[128];
    for (int t = blockIdx.x / kClusterCtas; t < of.row_pairs * of.column_tiles;
         t += gridDim.x / kClusterCtas) {
      const ProductTile tile(t, of);
      const int row = (tile.pair * kClusterCtas + rank) * kTileRows;
      const int column = tile.column * columns_of(kProducts);
      ahead(row, column);
      if constexpr (kProducts == Products::difference) {
        multiply_tile<T, kTransposeB, false>(memory, at, of.other_steps, z);
        negate(z);
        multiply_tile<T, kTransposeB, true>(memory, at, of.steps, z);
      } else {
        multiply_tile<T, kTransposeB, false>(memory, at, of.steps, z);
      }
      epilogue(z, row, column, writer);
    }
    writer.drain();
  }
  cluster_sync();  // no CTA exits while the other may still signal it
}

}  // namespace logitless::cuda

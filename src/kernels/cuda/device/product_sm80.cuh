// A GEMM by mma.sync whose epilogue the caller gives: c = a . b in tiles of 128 x 128 fp32 sums
// that stay in registers. Generated kernels include it (kernels/device/tile_engine.h), so it needs
// no header of the host.
#pragma once

#include "kernels/cuda/device/tiles_sm80.cuh"

namespace logitless::cuda::tiles_sm80 {

// Operands in memory: rows at multiples of 16 bytes, `stride` elements apart.
struct ProductMatrix {
  const void* data;
  std::int64_t stride;
};
// c [m, n] = a [m, k] . b [k, n]; n is a multiple of 8.
struct ProductSizes {
  int m, n, k;
};

// The first row and column of a CTA's tile. CTAs that run at a time have tiles of kGroup rows of
// tiles and of as many columns, so that operands come from L2.
struct ProductTile {
  static constexpr int kGroup = 16;
  __device__ __forceinline__ explicit ProductTile(const ProductSizes& of) {
    const int tall = (of.m + kTile - 1) / kTile, wide = (of.n + kTile - 1) / kTile;
    const int t = static_cast<int>(blockIdx.x);
    const int group = t / (kGroup * wide), first = group * kGroup;
    const int height = tall - first < kGroup ? tall - first : kGroup;
    const int inside = t - first * wide;
    row = (first + inside % height) * kTile;
    column = inside / height * kTile;
  }
  int row, column;
};

// Stores 16 rows x 64 columns of 16-bit numbers of a warp, those of block m of its rows. pairs:
// pair 2 n + half has registers m * 32 + n * 4 + half * 2 and the next. to[half]: the thread's row
// at the tile's first column; stored if `exists`. columns: those of the tile that exist, a multiple
// of 8. Rows begin at multiples of 16 bytes.
__device__ __forceinline__ void store_rows(const unsigned (&pairs)[16], void* const (&to)[2],
                                           const bool (&exists)[2], int columns) {
  const std::uint64_t policy = policy_pass();
  // Four lanes exchange theirs, so that each has eight adjacent columns.
  const int column = static_cast<int>(threadIdx.x / 32 % 2 * 64 + threadIdx.x % 4 * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 32 columns each
      std::uint32_t w[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) w[n] = pairs[2 * (4 * part + n) + half];
      transpose_pairs(w);
      const int at = column + part * 32;
      if (exists[half] && at < columns)
        store_16_bytes(static_cast<std::uint16_t*>(to[half]) + at, w, policy);
    }
  }
}

// Computes the CTA's tile. `b`: b^T [n, k] by rows, or with kTransposeB b [k, n]. kWhole: k is a
// multiple of kStep. The CTA calls ahead(row, column) of its tile, for prefetches, and then
// epilogue(z, row, column, memory): z are a thread's sums (row_of, column_of) of the tile that
// begins there, and `memory` is kPipelineBytes of shared memory that it may use. Launch: kThreads
// threads, kPipelineBytes of shared memory, a CTA for each tile.
template <typename T, int kTransposeB, bool kWhole, typename Ahead, typename Epilogue>
__device__ __forceinline__ void product_of_tiles(const ProductMatrix& a, const ProductMatrix& b,
                                                 const ProductSizes& of, const Ahead& ahead,
                                                 const Epilogue& epilogue) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const auto stages = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory));
  const ProductTile tile(of);
  ahead(tile.row, tile.column);
  const Loader<T, true, kWhole> left(a.data, a.stride, tile.row, of.m, stages);
  const Loader<T, kTransposeB == 0, kWhole> right(b.data, b.stride, tile.column, of.n,
                                                  stages + kOperandBytes);
  const std::uint64_t keep = policy_keep();
  int k = 0;
  const auto load = [&](int stage) {
    if (k >= of.k) return false;
    left.load(stage, k, of.k, keep);
    right.load(stage, k, of.k, keep);
    k += kStep;
    return true;
  };
  float z[128];
  multiply_steps<T>(z, FragmentReader<true, kTransposeB == 0>(stages), load);
  __syncthreads();  // other warps may still read the last stage
  epilogue(z, tile.row, tile.column, shared_memory);
}

}  // namespace logitless::cuda::tiles_sm80

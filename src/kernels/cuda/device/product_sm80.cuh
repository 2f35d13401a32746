// GEMMs by mma.sync whose epilogue the caller gives: one or two products in tiles of 128 x 128 fp32
// sums that stay in registers. Generated kernels include it (kernels/device/tile_engine.h), so it
// needs no header of the host.
#pragma once

#include "kernels/cuda/device/tiles_sm80.cuh"

namespace logitless::cuda::tiles_sm80 {

// Operands in memory: rows at multiples of 16 bytes, `stride` elements apart.
struct ProductMatrix {
  const void* data;
  std::int64_t stride;
};
// The sums of a tile:
//   one: a . b, 128 columns
//   beside: a . b and a . d by turns, 32 columns each: a warp has 32 columns of both
//   difference: a . b - c . d, 128 columns
enum class Products { one, beside, difference };
// a [m, k], b [k, n], or b^T [n, k] by rows. Operands that a product does not have are null.
struct ProductOperands {
  ProductMatrix a, b, c, d;
};
// Results are [m, n]; n is a multiple of 8. k: of a . b, other_k: of c . d.
struct ProductSizes {
  int m, n, k, other_k;
};

// Columns of each result in a tile, and in a warp's half of it.
constexpr int columns_of(Products products) {
  return products == Products::beside ? kTile / 2 : kTile;
}
template <Products kProducts>
__device__ __forceinline__ int column_of_result(int n) {
  return static_cast<int>(threadIdx.x / 32 % 2) * (columns_of(kProducts) / 2) +
         static_cast<int>(threadIdx.x % 4 * 2) + n * 8;
}

// The first row and column of a CTA's tile. CTAs that run at a time have tiles of kGroup rows of
// tiles and of as many columns, so that operands come from L2.
struct ProductTile {
  static constexpr int kGroup = 16;
  __device__ __forceinline__ ProductTile(const ProductSizes& of, int columns) {
    const int tall = (of.m + kTile - 1) / kTile, wide = (of.n + columns - 1) / columns;
    const int t = static_cast<int>(blockIdx.x);
    const int group = t / (kGroup * wide), first = group * kGroup;
    const int height = tall - first < kGroup ? tall - first : kGroup;
    const int inside = t - first * wide;
    row = (first + inside % height) * kTile;
    column = inside / height * columns;
  }
  int row, column;
};

// Stores 16 rows x 4 kPairs columns of 16-bit numbers of a warp, those of block m of its rows.
// pairs: pair 2 n + half has registers m * 32 + n * 4 + half * 2 and the next. to[half]: the
// thread's row at the tile's first column; stored if `exists`. columns: those of the tile that
// exist, a multiple of 8. Rows begin at multiples of 16 bytes.
template <int kPairs>
__device__ __forceinline__ void store_rows(const unsigned (&pairs)[kPairs], void* const (&to)[2],
                                           const bool (&exists)[2], int columns) {
  const std::uint64_t policy = policy_pass();
  // Four lanes exchange theirs, so that each has eight adjacent columns.
  const int column = static_cast<int>(threadIdx.x / 32 % 2 * (4 * kPairs) + threadIdx.x % 4 * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int part = 0; part < kPairs / 8; ++part) {  // 32 columns each
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

// Copies the right operands of two products side by side, 32 columns of each by turns, as Loader
// copies one. kSide: the operands are [columns, contracted], else [contracted, columns].
template <typename T, bool kSide, bool kWhole>
class TwoLoaders {
 public:
  // `across`: first column of both results. `limit`: their number.
  __device__ __forceinline__ TwoLoaders(const ProductMatrix& first, const ProductMatrix& second,
                                        int across, int limit, std::uint32_t to)
      : to_(to + row() * kRowBytes + (place<kSide>(row(), chunk()) << 4)) {
    // Without kSide, a thread copies columns of one of them alone.
    const bool swaps = !kSide && chunk() / 4 % 2 == 1;
    stride_[0] = swaps ? second.stride : first.stride;
    stride_[1] = second.stride;
    const int column = across + (kSide ? row() : chunk() / 8 * 32 + chunk() % 4 * 8);
    const auto from = [&](const void* data, std::int64_t stride) {
      return static_cast<const T*>(data) +
             (kSide ? column * stride + chunk() * 8 : row() * stride + column);
    };
    from_[0] = from(swaps ? second.data : first.data, stride_[0]);
    from_[1] = from(second.data, stride_[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) exists_[half] = column + (kSide ? half * 32 : 0) < limit;
  }
  // Copies the step from contracted element k on; 0 for elements from `end` on.
  __device__ __forceinline__ void load(int stage, int k, int end, std::uint64_t policy) const {
    const std::uint32_t to = to_ + static_cast<std::uint32_t>(stage * kStageBytes);
    const int left = end - k - chunk() * 8;  // kSide: elements of this chunk
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int of = kSide ? i % 2 : 0;
      const T* const from =
          from_[of] + (kSide ? k + i / 2 * 32 * stride_[of] : (k + i * kCopyRows) * stride_[of]);
      const std::uint32_t at = to + i * kCopyRows * kRowBytes;
      if (kSide && !kWhole && k + kStep > end) {
        const int bytes = left <= 0 ? 0 : left < 8 ? 2 * left : 16;
        copy_async_bytes(exists_[i / 2] ? bytes : 0, at, from);
      } else {
        const bool inside = kSide || kWhole || k + row() + i * kCopyRows < end;
        copy_async_if(inside && exists_[kSide ? i / 2 : 0], at, from, policy);
      }
    }
  }

 private:
  static constexpr int kRowBytes = (kSide ? kStep : kTile) * 2;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kCopyRows = kThreads / kChunks;  // 32 with kSide: columns of one operand
  static constexpr int kCopies = kOperandBytes / (kThreads * 16);
  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ __forceinline__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  std::uint32_t to_;
  const T* from_[2];
  std::int64_t stride_[2];
  bool exists_[2];  // kSide: the thread's column of each pair of copies
};

// z += the sums of a tile of `depth` contracted elements.
template <typename T, class Reader, class Left, class Right>
__device__ __forceinline__ void add_product(float (&z)[128], const Reader& reader, const Left& left,
                                            const Right& right, int depth, std::uint64_t policy) {
  int k = 0;
  add_steps<T>(z, reader, [&](int stage) {
    if (k >= depth) return false;
    left.load(stage, k, depth, policy);
    right.load(stage, k, depth, policy);
    k += kStep;
    return true;
  });
  __syncthreads();  // other warps may still read the last stage
}

// Computes the CTA's tile. `b` and `d`: transposed by rows, or with kTransposeB not. kWhole: k and
// other_k are multiples of kStep. The CTA calls ahead(row, column) of its tile, for prefetches, and
// then epilogue(z, row, column, memory): z are a thread's sums (row_of, column_of_result) of the
// tile that begins there, and `memory` is kPipelineBytes of shared memory that it may use. Launch:
// kThreads threads, kPipelineBytes of shared memory, a CTA for each tile.
template <typename T, int kTransposeB, bool kWhole, Products kProducts, typename Ahead,
          typename Epilogue>
__device__ __forceinline__ void products_of_tiles(const ProductOperands& in, const ProductSizes& of,
                                                  const Ahead& ahead, const Epilogue& epilogue) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const auto stages = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory));
  const std::uint32_t right_stages = stages + kOperandBytes;
  const ProductTile tile(of, columns_of(kProducts));
  ahead(tile.row, tile.column);
  const FragmentReader<true, kTransposeB == 0> reader(stages);
  const std::uint64_t keep = policy_keep();
  float z[128];
#pragma unroll
  for (float& value : z) value = 0.0f;
  using Left = Loader<T, true, kWhole>;
  using Right = Loader<T, kTransposeB == 0, kWhole>;
  if constexpr (kProducts == Products::difference) {
    const Left left(in.c.data, in.c.stride, tile.row, of.m, stages);
    const Right right(in.d.data, in.d.stride, tile.column, of.n, right_stages);
    add_product<T>(z, reader, left, right, of.other_k, keep);
#pragma unroll
    for (int i = 0; i < 128; ++i) z[i] = -z[i];
  }
  const Left left(in.a.data, in.a.stride, tile.row, of.m, stages);
  if constexpr (kProducts == Products::beside) {
    const TwoLoaders<T, kTransposeB == 0, kWhole> right(in.b, in.d, tile.column, of.n,
                                                        right_stages);
    add_product<T>(z, reader, left, right, of.k, keep);
  } else {
    const Right right(in.b.data, in.b.stride, tile.column, of.n, right_stages);
    add_product<T>(z, reader, left, right, of.k, keep);
  }
  epilogue(z, tile.row, tile.column, shared_memory);
}

}  // namespace logitless::cuda::tiles_sm80

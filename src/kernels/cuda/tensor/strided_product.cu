#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/tensor/element.cuh"
#include "kernels/cuda/tensor/strided_product.h"

namespace logitless::cuda {
namespace {

constexpr int kTile = 64;      // rows and columns of a tile
constexpr int kDepth = 16;     // steps along the inner dimension
constexpr int kThreads = 256;  // each with 4 x 4 elements

// Sum: float, or double for f64.
template <typename Sum>
__global__ void __launch_bounds__(kThreads)
    multiply_tiles(const GemmShape s, const void* a, const void* b, void* c) {
  __shared__ Sum left[kDepth][kTile + 1];
  __shared__ Sum right[kDepth][kTile + 1];
  const int row = static_cast<int>(threadIdx.x) / 16, column = static_cast<int>(threadIdx.x) % 16;
  const std::int64_t first_row = std::int64_t{blockIdx.x} * kTile;
  const std::int64_t first_column = std::int64_t{blockIdx.y} * kTile;
  for (std::int64_t batch = blockIdx.z; batch < s.batch; batch += gridDim.z) {
    Sum sum[4][4] = {};
    for (std::int64_t depth = 0; depth < s.k; depth += kDepth) {
      for (int i = static_cast<int>(threadIdx.x); i < kDepth * kTile; i += kThreads) {
        const std::int64_t r = first_row + i % kTile, n = first_column + i % kTile,
                           k = depth + i / kTile;
        left[i / kTile][i % kTile] =
            r < s.m && k < s.k
                ? load<Sum>(a, s.a.dtype,
                            batch * s.a.batch_stride + r * s.a.row_stride + k * s.a.col_stride)
                : Sum{0};
        right[i / kTile][i % kTile] =
            n < s.n && k < s.k
                ? load<Sum>(b, s.b.dtype,
                            batch * s.b.batch_stride + k * s.b.row_stride + n * s.b.col_stride)
                : Sum{0};
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[i][j] += left[k][row + 16 * i] * right[k][column + 16 * j];
        }
      }
      __syncthreads();
    }
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const std::int64_t r = first_row + row + 16 * i, n = first_column + column + 16 * j;
        if (r >= s.m || n >= s.n) continue;
        const std::int64_t at = batch * s.c.batch_stride + r * s.c.row_stride + n * s.c.col_stride;
        const Sum old = s.accumulate ? load<Sum>(c, s.c.dtype, at) : Sum{0};
        store(c, s.c.dtype, at, old + sum[i][j]);
      }
    }
  }
}

}  // namespace

void multiply_strided(const GemmShape& s, const void* a, const void* b, void* c, Stream stream) {
  if (s.m == 0 || s.n == 0 || s.batch == 0) return;
  const auto tiles = [](std::int64_t size) {
    return static_cast<unsigned>((size + kTile - 1) / kTile);
  };
  constexpr unsigned kMostTiles = 65535;
  if (tiles(s.n) > kMostTiles)
    throw Unsupported(concat("product: ", s.n, " columns of these strides, expected at most ",
                             std::int64_t{kMostTiles} * kTile));
  const dim3 grid(tiles(s.m), tiles(s.n),
                  static_cast<unsigned>(std::min<std::int64_t>(s.batch, kMostTiles)));
  const auto on = static_cast<cudaStream_t>(stream);
  if (s.a.dtype == DType::f64) {
    multiply_tiles<double><<<grid, kThreads, 0, on>>>(s, a, b, c);
  } else {
    multiply_tiles<float><<<grid, kThreads, 0, on>>>(s, a, b, c);
  }
  require_cuda(cudaGetLastError(), "strided product");
}

}  // namespace logitless::cuda

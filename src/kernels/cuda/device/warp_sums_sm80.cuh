// A warp's 64 x 64 fp32 sums by mma.sync of compute capability 8.0 and later, which the tile
// kernels share. Generated kernels include it (kernels/device/tile_engine.h), so it needs no header
// of the host.
#pragma once

#include "kernels/cuda/device/mma_sm80.cuh"

namespace logitless::cuda {

// Operands of a warp for 64 x 64 results and 16 along the contracted index.
struct WarpOperands {
  std::uint32_t a[4][4];  // of 16 rows each
  std::uint32_t b[4][4];  // of 16 columns each
};
// Adds their product. Register m * 32 + n * 4 + half * 2 + j of a lane is row 16 m + 8 half + lane
// / 4 and column 8 n + lane % 4 * 2 + j.
template <typename T>
__device__ __forceinline__ void multiply(float (&z)[128], const WarpOperands& f) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int nn = 0; nn < 8; ++nn) {
      const int n = m % 2 == 0 ? nn : 7 - nn;
      mma<T>(*reinterpret_cast<float(*)[4]>(z + m * 32 + n * 4), f.a[m], f.b[n / 2][n % 2 * 2],
             f.b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

// Transposes 4 x 4 pairs over four lanes: register n of lane l becomes register l of lane n.
__device__ __forceinline__ void transpose_pairs(std::uint32_t (&w)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    const std::uint32_t got = __shfl_xor_sync(~0u, odd ? w[n] : w[n + 1], 1);
    (odd ? w[n] : w[n + 1]) = got;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const std::uint32_t got = __shfl_xor_sync(~0u, high ? w[n] : w[n + 2], 2);
    (high ? w[n] : w[n + 2]) = got;
  }
}

}  // namespace logitless::cuda

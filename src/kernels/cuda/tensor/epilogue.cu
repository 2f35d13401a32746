#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/tensor/element.cuh"
#include "kernels/cuda/tensor/epilogue.h"

namespace logitless::cuda {
namespace {

// gelu's tanh approximation: tanh(sqrt(2 / pi) (x + 0.044715 x^3)).
constexpr float kScale = 0.7978845608028654f, kCube = 0.044715f;
__device__ float gelu_tanh(float x) { return tanhf(kScale * (x + kCube * x * x * x)); }
__device__ float gelu(float x) { return 0.5f * x * (1.0f + gelu_tanh(x)); }
__device__ float gelu_gradient(float x) {
  const float t = gelu_tanh(x);
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kScale * (1.0f + 3.0f * kCube * x * x);
}

// Returns x, an element of the GEMM, with the epilogue. Stores aux of gelu.
__device__ __forceinline__ float with_epilogue(const GemmShape& s, const GemmCall& call,
                                               std::int64_t row, std::int64_t column, float x) {
  const auto at = [&](const MatrixLayout& m) { return row * m.row_stride + column * m.col_stride; };
  const GemmEpilogue& e = s.epilogue;
  const DType dtype = s.c.dtype;
  if (e.bias) x += load<float>(call.bias, dtype, column);
  if (e.residual) x += load<float>(call.residual, dtype, at(e.residual_layout));
  if (e.gelu) {
    store(call.aux, dtype, at(e.aux_layout), x);
    x = gelu(x);
  }
  if (e.gelu_gradient) x *= gelu_gradient(load<float>(call.aux, dtype, at(e.aux_layout)));
  return x;
}

constexpr int kThreads = 256;
// A thread for each element.
__global__ void __launch_bounds__(kThreads)
    finish_elements(const GemmShape s, const GemmCall call) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= s.m * s.n) return;
  const std::int64_t row = i / s.n, column = i % s.n;
  const std::int64_t at = row * s.c.row_stride + column * s.c.col_stride;
  const float x = load<float>(call.c, s.c.dtype, at);
  store(call.c, s.c.dtype, at, with_epilogue(s, call, row, column, x));
}

// A thread for each element of a row; thread blocks share the rows.
__global__ void __launch_bounds__(kThreads)
    finish_sums(const GemmShape s, const GemmCall call, const BlockSums block) {
  const std::int64_t j = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= block.columns) return;
  const std::int64_t column = block.first_column + j;
  for (std::int64_t i = blockIdx.y; i < block.rows; i += gridDim.y) {
    const std::int64_t row = block.first_row + i;
    const float* const sums = block.sums + i * block.stride + j;
    float x = sums[0];
#pragma unroll 8
    for (std::int64_t part = 1; part < block.parts; ++part)
      x += sums[part * block.rows * block.stride];
    for (std::int64_t k = block.first_k; k < s.k; ++k)
      x = fmaf(load<float>(call.a, s.a.dtype, row * s.a.row_stride + k * s.a.col_stride),
               load<float>(call.b, s.b.dtype, k * s.b.row_stride + column * s.b.col_stride), x);
    const std::int64_t at = row * s.c.row_stride + column * s.c.col_stride;
    if (s.accumulate) x += load<float>(call.c, s.c.dtype, at);
    store(call.c, s.c.dtype, at, with_epilogue(s, call, row, column, x));
  }
}

unsigned blocks(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

void apply_epilogue(const GemmShape& s, const GemmCall& call) {
  if (s.m == 0 || s.n == 0) return;
  finish_elements<<<blocks(s.m * s.n), kThreads, 0, static_cast<cudaStream_t>(call.stream)>>>(s,
                                                                                              call);
  require_cuda(cudaGetLastError(), "epilogue of a product");
}

void finish_block(const GemmShape& s, const GemmCall& call, const BlockSums& block) {
  if (block.rows == 0 || block.columns == 0) return;
  constexpr std::int64_t kMostRows = 65535;
  const dim3 grid(blocks(block.columns), static_cast<unsigned>(std::min(block.rows, kMostRows)));
  finish_sums<<<grid, kThreads, 0, static_cast<cudaStream_t>(call.stream)>>>(s, call, block);
  require_cuda(cudaGetLastError(), "block of a product");
}

}  // namespace logitless::cuda

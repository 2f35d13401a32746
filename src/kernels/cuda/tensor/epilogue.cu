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

constexpr int kThreads = 256;
// A thread for each element.
__global__ void __launch_bounds__(kThreads)
    finish_elements(const GemmShape s, const GemmCall call) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= s.m * s.n) return;
  const std::int64_t row = i / s.n, column = i % s.n;
  const auto at = [&](const MatrixLayout& m) { return row * m.row_stride + column * m.col_stride; };
  const GemmEpilogue& e = s.epilogue;
  const DType dtype = s.c.dtype;
  float x = load<float>(call.c, dtype, at(s.c));
  if (e.bias) x += load<float>(call.bias, dtype, column);
  if (e.residual) x += load<float>(call.residual, dtype, at(e.residual_layout));
  if (e.gelu) {
    store(call.aux, dtype, at(e.aux_layout), x);
    x = gelu(x);
  }
  if (e.gelu_gradient) x *= gelu_gradient(load<float>(call.aux, dtype, at(e.aux_layout)));
  store(call.c, dtype, at(s.c), x);
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

}  // namespace logitless::cuda

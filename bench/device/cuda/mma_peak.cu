#include <cuda_runtime.h>

#include "device/cuda/mma_peak.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma_sm80.cuh"
#include "kernels/device/head.h"

namespace logitless::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kProducts = 20000;

__global__ void __launch_bounds__(kThreads, 1) multiply(float* out) {
  float z[32][4] = {};
  std::uint32_t a[4][4], b[8][2];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) a[i][j] = 0x3f803f80u + threadIdx.x + i;
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 2; ++j) b[i][j] = 0x3f80bf80u + i;
  for (int k = 0; k < kProducts; ++k) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n) cuda::mma<__nv_bfloat16>(z[m * 8 + n], a[m], b[n][0], b[n][1]);
  }
  float sum = 0.0f;
  for (const auto& fragment : z)
    for (const float value : fragment) sum += value;
  if (sum == 12345.0f) *out = sum;  // never: it keeps the products
}

}  // namespace

double mma_peak() {
  const cuda::DeviceMemory out(sizeof(float));
  const int processors = cuda::processor_count();
  cuda::Timer timer;
  float milliseconds = 0.0f;
  for (int run = 0; run < 5; ++run) {
    timer.start(nullptr);
    multiply<<<processors, kThreads>>>(static_cast<float*>(out.data()));
    cuda::require_cuda(cudaGetLastError(), "products from registers");
    milliseconds = timer.stop(nullptr);
  }
  constexpr double kOperations = 2.0 * 16 * 8 * 16;  // of an instruction
  return processors * (kThreads / 32) * 32.0 * kOperations * kProducts / (milliseconds * 1e-3);
}

}  // namespace logitless::bench

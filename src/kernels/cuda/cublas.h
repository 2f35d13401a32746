// cuBLAS, found at run time: the library neither links nor needs it to start.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device_head.h"

namespace logitless::cuda {

// Row-major c [m, n] (fp32) = alpha op(a) op(b) + beta c; a is [m, k], or [k, m] when transposed, b
// [k, n] or [n, k]; strides of rows in elements. a and b are of one dtype; sums in fp32, and fp32
// operands are multiplied as such (no TF32). alpha and beta are floats of the device.
struct Gemm {
  DType dtype = DType::bf16;
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t a_stride = 0;
  bool a_transposed = false;
  const void* b = nullptr;
  std::int64_t b_stride = 0;
  bool b_transposed = false;
  float* c = nullptr;
  std::int64_t c_stride = 0;
  const float* alpha = nullptr;
  const float* beta = nullptr;
};

// What cuBLAS works in; the same for every call, or its results would depend on it.
inline constexpr std::size_t kCublasBytes = std::size_t{32} << 20;

// Empty, or why cuBLAS cannot be used. Empty without a GPU, too: plans for one elsewhere do without
// the library.
const std::string& cublas_missing();
// Makes this thread's handle for the current device: the one thing that allocates.
void cublas_prepare();
// Enqueues; workspace has kCublasBytes, aligned to 256. Throws DeviceError.
void cublas_multiply(const Gemm& gemm, void* workspace, Stream stream);

}  // namespace logitless::cuda

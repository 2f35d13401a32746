// cuBLAS, loaded at run time: the library neither links to it nor needs it to start.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/head.h"

namespace logitless::cuda {

// Row-major c [m, n] (fp32) = alpha op(a) op(b) + beta c. a is [m, k], or [k, m] when transposed; b
// is [k, n] or [n, k]. Strides of rows are in elements. a and b have one dtype; sums are fp32.
// alpha and beta are floats on the device.
struct Gemm {
  DType dtype = DType::bf16;
  Precision precision = Precision::ieee;  // of f32; bf16x3: multiply_split alone
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t a_stride = 0;
  bool a_transposed = false;
  const void* b = nullptr;
  std::int64_t b_stride = 0;
  bool b_transposed = false;
  float* c = nullptr;
  std::int64_t c_stride = 0;
  const float* alpha = nullptr;  // null: 1, and beta is 1 where it adds and 0 elsewhere
  const float* beta = nullptr;
  bool adds = false;
};

// Bytes of cuBLAS's workspace. Calls whose results are to agree pass the same size: results may
// depend on it.
inline constexpr std::size_t kCublasBytes = std::size_t{32} << 20;

// Returns why cuBLAS cannot be used, or empty. Also empty without a GPU: plans for another machine
// do not need the library.
const std::string& cublas_missing();
// Makes this thread's handle for the current device. Only this call allocates.
void cublas_prepare();
// Enqueues; the workspace is aligned to 256. Throws DeviceError.
void cublas_multiply(const Gemm& gemm, void* workspace, Stream stream,
                     std::size_t bytes = kCublasBytes);
// Memory of an operand's splits, aligned to 256: those of the first `kept` stretches, which are
// there already with `ready`, and behind them of one more (head/sizes.h).
struct Splits {
  void* data = nullptr;
  std::int64_t kept = 0;
  bool ready = false;
  DType dtype = DType::f32;  // of the operand, whatever Gemm's
};
// The same for operands of fp32 in Precision::bf16x3 (head/split_gemm.cu). One of f16 is split as
// if it were widened; b of bf16 saves a product.
void multiply_split(const Gemm& gemm, const Splits& a, const Splits& b, void* workspace,
                    Stream stream, std::size_t bytes);

}  // namespace logitless::cuda

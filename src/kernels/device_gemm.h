// Matrix products on a GPU: cuBLASLt, which is found at run time, and a kernel of our own for what
// it does not take. No CUDA headers here: a build without CUDA answers every call with the reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/device_head.h"
#include "logitless/dtype.h"

namespace logitless::cuda {

// A matrix of a batch: element (b, i, j) at data + b * batch_stride + i * row_stride + j *
// col_stride, in elements. The strides may be 0 or negative in an operand, not in the result.
// `alignment`: bytes that every use's address is a multiple of.
struct MatrixLayout {
  DType dtype = DType::f32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  std::int64_t alignment = 16;
  bool operator==(const MatrixLayout&) const = default;
};

// c[b] (+)= a[b] . b[b]:  a [m, k], b [k, n], c [m, n].
//   a, b: equal dtypes, f32 | bf16 | f16 | f64; c: f32, bf16 or f16, or f64 of f64
// Sums are fp32 (f64: f64; f32 operands are multiplied in fp32, not in tf32) and rounded to c's
// dtype once.
struct ProductShape {
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  MatrixLayout a, b, c;
  bool accumulate = false;
  bool operator==(const ProductShape&) const = default;
};

// Bytes that the product may use. Pure.
std::size_t product_workspace_bytes(const ProductShape& shape);

// Handles and the algorithm of one product on the current device. The algorithm is the first that
// cuBLASLt's heuristic names among those without atomic sums: the same bits every time, with the
// same library on the same kind of device.
class Product {
 public:
  // Throws Unsupported naming what is missing, DeviceError.
  explicit Product(const ProductShape& shape);

  // Enqueues; neither waits nor allocates, and may be captured into a CUDA graph. workspace:
  // product_workspace_bytes(), aligned to 256. From several threads at a time.
  void run(const void* a, const void* b, void* c, void* workspace, Stream stream) const;
  // "cublaslt" or "strided"
  const char* kernel() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace logitless::cuda

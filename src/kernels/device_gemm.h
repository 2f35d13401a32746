// Matrix products on a GPU: cuBLASLt, which is found at run time, and a kernel of our own for what
// it does not take. No CUDA headers here: a build without CUDA answers every call with the reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

// What a product does to its sums before they are stored: s = a . b + bias + residual, rounded to
// c's dtype once where the library does it, and else once more in between. Of one batch that is not
// accumulated.
//   c    s, or gelu(s), or, of gelu_gradient, s gelu'(aux); gelu by tanh
//   aux  of gelu: s, written
//   bias [n], residual [m, n], aux [m, n], of c's dtype
struct ProductEpilogue {
  bool bias = false, residual = false, gelu = false, gelu_gradient = false;
  MatrixLayout residual_layout = {}, aux_layout = {};
  std::int64_t bias_alignment = 16;
  bool has_aux() const { return gelu || gelu_gradient; }
  bool any() const { return bias || residual || has_aux(); }
  bool operator==(const ProductEpilogue&) const = default;
};

// c[b] (+)= a[b] . b[b]:  a [m, k], b [k, n], c [m, n].
//   a, b: equal dtypes, f32 | bf16 | f16 | f64; c: f32, bf16 or f16, or f64 of f64
// Sums are fp32 (f64: f64; f32 operands are multiplied in fp32, not in tf32) and rounded to c's
// dtype once.
struct ProductShape {
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  MatrixLayout a, b, c;
  bool accumulate = false;
  ProductEpilogue epilogue = {};
  bool operator==(const ProductShape&) const = default;
};

// Addresses of one run, in the device's memory. Null: not there.
struct ProductCall {
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
  const void *bias = nullptr, *residual = nullptr;
  void* aux = nullptr;
  void* workspace = nullptr;  // product_workspace_bytes(), aligned to 256
  Stream stream = nullptr;
};

// Bytes that the product may use. Pure.
std::size_t product_workspace_bytes(const ProductShape& shape);

// Handles and the algorithm of one product on the current device. The algorithm is one that
// cuBLASLt's heuristic names among those without atomic sums, the first or one that was measured to
// be faster: the same bits every time, with the same library on the same kind of device.
class Product {
 public:
  static constexpr int kBest = -1;
  // Throws Unsupported naming what is missing, DeviceError. `choice`: the so many-th algorithm that
  // the heuristic names, for what compares them; where there are fewer, `algorithm` is empty.
  explicit Product(const ProductShape& shape, int choice = kBest);
  ~Product();

  // Enqueues; neither waits nor allocates, and may be captured into a CUDA graph. From several
  // threads at a time.
  void run(const ProductCall& call) const;
  // "cublaslt" or "strided"
  const char* kernel() const;
  // What cuBLASLt says of its algorithm, by its own numbers; empty without it.
  std::string algorithm() const;
  // Whether the library's kernel has the epilogue in it; else kernels of our own follow.
  bool fused() const;

 private:
  struct State;
  struct Part;
  std::vector<Part> parts_;  // the first is nearly all of it
};

}  // namespace logitless::cuda

// GEMM on a GPU: cuBLASLt, loaded at run time, and a kernel of our own for layouts that it does not
// take. It includes no CUDA headers; in a build without CUDA every call throws the reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device/head.h"
#include "logitless/dtype.h"

namespace logitless::cuda {

// A matrix of a batch: element (b, i, j) is at data + b * batch_stride + i * row_stride + j *
// col_stride, in elements. Strides may be 0 or negative in an operand, not in the result.
// `alignment`: bytes that divide the address in every use.
struct MatrixLayout {
  DType dtype = DType::f32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  std::int64_t alignment = 16;
  bool operator==(const MatrixLayout&) const = default;
};

// GEMM epilogue: s = a . b + bias + residual. It is rounded to c's dtype once where the library
// fuses it, otherwise once more in between. Only for one batch that is not accumulated.
//   c    s, or gelu(s), or with gelu_gradient s gelu'(aux); gelu by tanh
//   aux  with gelu: s, written
//   bias [n], residual [m, n], aux [m, n], in c's dtype
struct GemmEpilogue {
  bool bias = false, residual = false, gelu = false, gelu_gradient = false;
  MatrixLayout residual_layout = {}, aux_layout = {};
  std::int64_t bias_alignment = 16;
  bool has_aux() const { return gelu || gelu_gradient; }
  bool any() const { return bias || residual || has_aux(); }
  bool operator==(const GemmEpilogue&) const = default;
};

// c[b] (+)= a[b] . b[b]:  a [m, k], b [k, n], c [m, n].
//   a, b: equal dtypes, f32 | bf16 | f16 | f64; c: f32, bf16 or f16, or f64 of f64
// Sums are fp32 (f64: f64) and rounded to c's dtype once. f32 operands are multiplied in fp32, not
// in tf32.
struct GemmShape {
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  MatrixLayout a, b, c;
  bool accumulate = false;
  GemmEpilogue epilogue = {};
  std::int64_t workspace = -1;  // bytes that a call has at most; -1: what the GEMM wants
  bool operator==(const GemmShape&) const = default;
};

// Device addresses of one run. Null: none.
struct GemmCall {
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
  const void *bias = nullptr, *residual = nullptr;
  void* aux = nullptr;
  void* workspace = nullptr;  // gemm_workspace_bytes(), aligned to 256
  Stream stream = nullptr;
};

// Workspace that the GEMM may use. Pure.
std::size_t gemm_workspace_bytes(const GemmShape& shape);
// Bytes that the GEMM moves beside its operands and result: fp32 sums of 16-bit results, and copies
// of operands with aligned rows. Pure.
std::int64_t gemm_additional_bytes(const GemmShape& shape);

// Handles and algorithm of one GEMM on the current device. The algorithm is among those of
// cuBLASLt's heuristic without atomic sums: the first, or one that was measured to be faster. The
// same library on the same kind of device gives the same bits every time.
class Product {
 public:
  static constexpr int kBest = -1;
  // Throws Unsupported naming what is missing, and DeviceError. `choice`: index into the
  // heuristic's algorithms, for benchmarks; `algorithm` is empty if there are fewer.
  explicit Product(const GemmShape& shape, int choice = kBest);
  ~Product();

  // Enqueues; neither waits nor allocates, and may be captured into a CUDA graph. Thread-safe.
  void run(const GemmCall& call) const;
  // "cublaslt" or "strided"
  const char* kernel() const;
  // Describes cuBLASLt's algorithm by its own numbers; empty without it.
  std::string algorithm() const;
  // Returns true if the library's kernel fuses the epilogue; otherwise kernels of our own follow.
  bool fused() const;

 private:
  struct State;
  struct Part;
  const State& first() const;  // covers nearly all of the GEMM, or of its first block
  GemmShape shape_;
  std::vector<Part> parts_;
};

}  // namespace logitless::cuda

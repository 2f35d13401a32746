// CPU kernels of the tensor compiler's executor: GEMM, attention and vector functions.
//
// Nothing here allocates: the caller passes scratch, 64-byte aligned. Results have the same bits
// for any number of threads: each output belongs to one task, and every sum has a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "logitless/dtype.h"
#include "math/lse_state.h"

namespace logitless {

// A matrix of a batch: element (b, i, j) is at data + b * batch_stride + i * row_stride + j *
// col_stride, in elements. Strides may be 0 or negative in an operand, not in an output.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};
struct GemmOutput {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

// c[b] (+)= a[b] . b[b]:  a [m, k], b [k, n], c [m, n].
//   a, b: f32 | bf16 | f16, equal, and c any of them; or all three f64.
// Sums are fp32 (f64: f64) and rounded to c's dtype once. c overlaps no operand.
struct GemmProblem {
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  GemmOperand a, b;
  GemmOutput c;
  bool accumulate = false;
  int threads = 1;
};

// Pure: reads everything but the data pointers.
std::size_t gemm_scratch_bytes(const GemmProblem& problem);
void gemm(const GemmProblem& problem, std::byte* scratch);

// Fused attention: softmax(z) v with scores z = softcap(scale * q k^T) + bias, without
// materialising z.
//   q, out [B, H, T, D]    k, v [B, Hkv, S, D]    H a multiple of Hkv.
//   Query head h reads key head h / (H / Hkv).
// Sums are fp32. The bf16 tile kernels round probabilities and score gradients to bf16 for their
// GEMMs; elsewhere they stay fp32.
//
// The last dimension is contiguous; strides count elements. Query t has position p = t + (S - T).
// With causal it sees the keys s <= p, with a window p - window < s < p + window, with segments the
// keys of its segment. A row that sees no key gives 0, and -inf as its log-sum-exp.
struct AttentionOperand {
  const void* data = nullptr;
  std::int64_t stride_b = 0, stride_h = 0, stride_t = 0;
};
struct AttentionOutput {
  void* data = nullptr;
  std::int64_t stride_b = 0, stride_h = 0, stride_t = 0;
};
// Rows of bias that are added to scores. A stride of 0 broadcasts.
struct AttentionBias {
  AttentionOperand rows;
  DType dtype = DType::f32;  // f32 | bf16 | f16
};
// Segment ids of queries [B, T] and keys [B, S], rows of contiguous elements.
struct AttentionSegments {
  const void* queries = nullptr;
  const void* keys = nullptr;
  DType dtype = DType::i32;  // i32 | i64
  std::int64_t query_stride = 0, key_stride = 0;
};
struct AttentionShape {
  std::int64_t batch = 1, heads = 1, kv_heads = 1, queries = 0, keys = 0, dim = 0;
  DType dtype = DType::f32;  // of every operand and output: f32 | bf16 | f16
  bool causal = false;
  float scale = 1.0f;
  int threads = 1;
  float softcap = 0.0f;     // c tanh(z / c); 0: none
  std::int64_t window = 0;  // 0: unlimited
  std::optional<AttentionBias> bias = std::nullopt;
  std::optional<AttentionSegments> segments = std::nullopt;
};

// O(threads * block * dim) and, for the backward, a float per (b, h, t). With bf16 tiles the
// backward may also take an fp32 dq of one kv head per thread, at most 4 MiB each.
std::size_t attention_scratch_bytes(const AttentionShape& shape, bool backward);
// lse [B, H, T]: log-sum-exp of each row of z.
void attention_forward(const AttentionShape& shape, const AttentionOperand& q,
                       const AttentionOperand& k, const AttentionOperand& v,
                       const AttentionOutput& out, float* lse, std::byte* scratch);
// Reads out and lse of the forward. dq, dk, dv are written, not added to. bias has no gradient.
void attention_backward(const AttentionShape& shape, const AttentionOperand& q,
                        const AttentionOperand& k, const AttentionOperand& v,
                        const AttentionOperand& out, const AttentionOperand& d_out,
                        const float* lse, const AttentionOutput& dq, const AttentionOutput& dk,
                        const AttentionOutput& dv, std::byte* scratch);

// Functions of contiguous vectors. NaN in gives NaN out, max and min included; subnormal results
// may be 0.
enum class VectorOp : std::uint8_t {
  // unary
  neg,
  abs,
  exp,
  log,
  log1p,
  expm1,
  sqrt,
  rsqrt,
  tanh,
  erf,
  sigmoid,
  sin,
  cos,
  atan,
  erfc,
  lgamma,
  digamma,
  trigamma,
  floor,
  sign,
  // binary; comparisons and logic give 1 or 0
  add,
  sub,
  mul,
  div,
  max,
  min,
  pow,
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  logical_and,
  logical_or,
  logical_not,  // unary
  select,       // a != 0 ? b : c
};
inline constexpr int kVectorOpCount = static_cast<int>(VectorOp::select) + 1;

// Operands that the operation does not take may be null; out may alias an operand.
using VectorFunction = void (*)(const float* a, const float* b, const float* c, float* out,
                                std::int64_t n);
VectorFunction vector_function(VectorOp op);
using VectorFunctionF64 = void (*)(const double* a, const double* b, const double* c, double* out,
                                   std::int64_t n);
VectorFunctionF64 vector_function_f64(VectorOp op);

// Convert n contiguous elements between f32 and f32, bf16 or f16, rounding to nearest even.
void to_f32(DType dtype, const void* from, float* to, std::int64_t n);
void from_f32(DType dtype, const float* from, void* to, std::int64_t n);

// Rounds f32 to the precision of f32, bf16 or f16. `to` may alias `from`.
void round_f32(DType dtype, const float* from, float* to, std::int64_t n);

// Reductions of a contiguous row. An empty row gives 0, -inf and {0, 0}.
float row_sum(const float* x, std::int64_t n);
float row_max(const float* x, std::int64_t n);
LseState row_lse(const float* x, std::int64_t n);

// sum_i a[i] b[i];  y[i] += factor x[i]
float dot(const float* a, const float* b, std::int64_t n);
void add_scaled(const float* x, float factor, float* y, std::int64_t n);
// y[i] += x[i];  y[i] = max(y[i], x[i])
void add_to(const float* x, float* y, std::int64_t n);
void max_to(const float* x, float* y, std::int64_t n);
// Adds exp(x[i] - top[i]) to sum[i], where top[i] is the running maximum: an online softmax. Start
// with top = -inf and sum = 0. An infinity minus itself counts as 0; a NaN stays in sum.
void add_exponentials(const float* x, float* top, float* sum, std::int64_t n);
// Compares integers, eq to ge: 1 or 0. out overlaps no operand.
void compare_i64(VectorOp op, const std::int64_t* a, const std::int64_t* b, float* out,
                 std::int64_t n);
void compare_i64(VectorOp op, const std::int64_t* a, const std::int64_t* b, double* out,
                 std::int64_t n);

namespace cpu {
// GEMM of bf16 with emulated AMX tiles, and its scratch, so that tests cover that path on any
// machine.
std::size_t gemm_scratch_bytes_emulated_tiles(const GemmProblem& problem);
void gemm_emulated_tiles(const GemmProblem& problem, std::byte* scratch);
}  // namespace cpu

}  // namespace logitless

// Common parts of the attention engines: decomposition into tasks, their inputs and outputs.
//
// Fields of a plan: the AttentionShape `shape`; dim_n (dim padded, the stride of rows of sums);
// query_blocks and key_blocks; group (query heads of a kv head); reach; by_head.
#if defined(LOGITLESS_TENSOR_ATTENTION_TASKS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_TENSOR_ATTENTION_TASKS_INL_H
#undef LOGITLESS_TENSOR_ATTENTION_TASKS_INL_H
#else
#define LOGITLESS_TENSOR_ATTENTION_TASKS_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/parallel.h"
#include "kernels/cpu/tensor/attention/scores-inl.h"
#include "kernels/cpu/tensor/gemm-inl.h"
#include "kernels/cpu/tensor/vector-inl.h"
#include "kernels/cpu_tensor.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Calls task(b, h, query block, thread), last queries first: with a causal mask they see most keys.
template <class Plan, class Task>
void ForQueryBlocks(const Plan& plan, const Task& task) {
  const AttentionShape& shape = plan.shape;
  parallel_for(shape.threads, shape.batch * shape.heads * plan.query_blocks,
               [&](std::int64_t index, int thread) {
                 const std::int64_t head = index / plan.query_blocks;
                 const std::int64_t block = plan.query_blocks - 1 - index % plan.query_blocks;
                 task(head / shape.heads, head % shape.heads, block, thread);
               });
}
// Calls task(b, kv head, key block, thread).
template <class Plan, class Task>
void ForKeyBlocks(const Plan& plan, const Task& task) {
  const AttentionShape& shape = plan.shape;
  parallel_for(shape.threads, shape.batch * shape.kv_heads * plan.key_blocks,
               [&](std::int64_t index, int thread) {
                 const std::int64_t head = index / plan.key_blocks;
                 task(head / shape.kv_heads, head % shape.kv_heads, index % plan.key_blocks,
                      thread);
               });
}

// Runs the tasks of a backward. begin(b, h, query block, thread) comes before all others. With
// plan.by_head, heads(b, kv head, thread) then computes everything of a kv head and its query
// heads. Without, keys(b, kv head, key block, thread) computes dk and dv, and queries(b, h, query
// block, thread) dq.
template <class Plan, class Begin, class Heads, class Keys, class Queries>
void ForBackwardTasks(const Plan& plan, const Begin& begin, const Heads& heads, const Keys& keys,
                      const Queries& queries) {
  ForQueryBlocks(plan, begin);
  if (plan.by_head) {
    const AttentionShape& shape = plan.shape;
    parallel_for(shape.threads, shape.batch * shape.kv_heads, [&](std::int64_t head, int thread) {
      heads(head / shape.kv_heads, head % shape.kv_heads, thread);
    });
    return;
  }
  ForKeyBlocks(plan, keys);
  ForQueryBlocks(plan, queries);
}

// Rows of an operand for one (b, h): dim contiguous elements each.
struct HeadRows {
  const void* data;
  DType dtype;
  std::int64_t offset, stride;
};

inline HeadRows HeadOf(const AttentionOperand& x, DType dtype, std::int64_t b, std::int64_t h) {
  return {x.data, dtype, b * x.stride_b + h * x.stride_h, x.stride_t};
}

struct BackwardOperands {
  const AttentionOperand &q, &k, &v, &out, &d_out;
  const float *lse, *delta;  // [B, H, T]
  const AttentionOutput &dq, &dk, &dv;
};

// Inputs of a task for the queries [q0, q0 + rows) of a head.
struct QueryTaskRows {
  HeadRows q, d_out, keys, values;
  std::int64_t rows;
  std::int64_t first_key, end_key;  // keys that some query may see; starts at a block boundary
};
template <class Plan>
QueryTaskRows RowsOfQueries(const Plan& plan, const BackwardOperands& x, std::int64_t b,
                            std::int64_t h, std::int64_t q0, std::int64_t block,
                            std::int64_t key_block) {
  const DType dtype = plan.shape.dtype;
  const std::int64_t rows = std::min(block, plan.shape.queries - q0);
  return {HeadOf(x.q, dtype, b, h),
          HeadOf(x.d_out, dtype, b, h),
          HeadOf(x.k, dtype, b, h / plan.group),
          HeadOf(x.v, dtype, b, h / plan.group),
          rows,
          plan.reach.FirstKey(q0, plan.shape.keys, key_block),
          plan.reach.EndKey(q0 + rows, plan.shape.keys)};
}

// delta[t] = sum(out[t] * d_out[t]) of the rows [first, end) of a head. left, right: [dim],
// scratch.
inline void SumProducts(const HeadRows& out, const HeadRows& d_out, std::int64_t first,
                        std::int64_t end, std::int64_t dim, float* left, float* right,
                        float* delta) {
  const auto size = static_cast<std::int64_t>(size_of(out.dtype));
  const auto row = [&](const HeadRows& x, std::int64_t t) {
    return static_cast<const std::byte*>(x.data) + (x.offset + t * x.stride) * size;
  };
  for (std::int64_t t = first; t < end; ++t) {
    ToF32(out.dtype, row(out, t), left, dim);
    ToF32(d_out.dtype, row(d_out, t), right, dim);
    MulVector(left, right, nullptr, left, dim);
    delta[t] = RowSum(left, dim);
  }
}

HWY_INLINE void ScaleRow(float* x, std::int64_t n, float factor) {
  const D d;
  const V f = hn::Set(d, factor);
  for (std::int64_t i = 0; i < n; i += FloatGemm::kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), f), d, x + i);
}

inline void StoreRow(const AttentionOutput& to, DType dtype, std::int64_t offset, const float* x,
                     std::int64_t dim) {
  const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
  FromF32(dtype, x, static_cast<std::byte*>(to.data) + offset * size, dim);
}

// Stores sums [rows][ld] as the rows [first, first + rows) of head h.
inline void StoreRows(const AttentionOutput& to, const AttentionShape& shape, std::int64_t b,
                      std::int64_t h, std::int64_t first, std::int64_t rows, const float* sums,
                      std::int64_t ld) {
  const std::int64_t offset = b * to.stride_b + h * to.stride_h + first * to.stride_t;
  for (std::int64_t r = 0; r < rows; ++r)
    StoreRow(to, shape.dtype, offset + r * to.stride_t, sums + r * ld, shape.dim);
}

// Log-sum-exp of a row, from the sum of 2^(x - row_max).
inline float LogSumExp(float row_max, float row_sum) {
  const double power = static_cast<double>(row_max) + std::log2(static_cast<double>(row_sum));
  return static_cast<float>(power * kLn2);
}

// Initialises the softmax of rows that have seen no key.
inline void StartSoftmax(std::int64_t rows, float* row_max, float* row_sum) {
  std::fill(row_max, row_max + rows, -std::numeric_limits<float>::infinity());
  std::fill(row_sum, row_sum + rows, 0.0f);
}
// Computes out and lse of the queries [q0, q0 + rows) from their sums [rows][dim_n].
template <class Plan>
void FinishSoftmax(const Plan& plan, std::int64_t b, std::int64_t h, std::int64_t q0,
                   std::int64_t rows, const float* row_max, const float* row_sum, float* sums,
                   const AttentionOutput& out, float* lse) {
  const AttentionShape& shape = plan.shape;
  for (std::int64_t r = 0; r < rows; ++r) {
    if (row_sum[r] != 0.0f) ScaleRow(sums + r * plan.dim_n, plan.dim_n, 1.0f / row_sum[r]);
    lse[(b * shape.heads + h) * shape.queries + q0 + r] = LogSumExp(row_max[r], row_sum[r]);
  }
  StoreRows(out, shape, b, h, q0, rows, sums, plan.dim_n);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

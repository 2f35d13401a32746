// Fused attention by blocks of queries x keys: the scores of one block at a time stay in L2.
//
// Forward: a task owns (b, h, query block) and runs an online softmax over the keys. Backward:
// scores are recomputed from the log-sum-exp. A task owns (b, kv head, key block) for dk and dv,
// and another (b, h, query block) for dq. Where dq is f32 and there are enough kv heads, a task
// owns a kv head, and accumulates dq as well. Sums run along blocks in order either way, so the
// bits are the same.
#if defined(LOGITLESS_TENSOR_ATTENTION_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_TENSOR_ATTENTION_INL_H
#undef LOGITLESS_TENSOR_ATTENTION_INL_H
#else
#define LOGITLESS_TENSOR_ATTENTION_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/tensor/attention/tasks-inl.h"
#include "kernels/cpu/tensor/gemm-inl.h"
#include "kernels/cpu_head.h"
#include "kernels/cpu_tensor.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

inline constexpr std::int64_t kQueryBlock = 192;
inline constexpr std::int64_t kKeyBlock = 144;  // full panels of FloatGemm on every target
inline constexpr std::int64_t kStrip = 48;      // rows or keys that share one bound of the mask
static_assert(kKeyBlock % FloatGemm::kColumns == 0 && kQueryBlock % FloatGemm::kRows == 0);

// Layout of a thread's scratch, in floats.
struct AttentionBuffers {
  std::int64_t q = 0, d_out = 0;          // [kQueryBlock][dim], unless f32
  std::int64_t scores = 0, d_scores = 0;  // [kQueryBlock][kKeyBlock]
  std::int64_t k = 0, v = 0;  // keys, values as panels of depth dim, or keys for the forward's v
  std::int64_t rows = 0, key_rows = 0;    // panels of dim columns, of depth queries or keys
  std::int64_t sum = 0, sum2 = 0;         // [kQueryBlock][dim_n], [kKeyBlock][dim_n]
  std::int64_t row_max = 0, row_sum = 0;  // [kQueryBlock]
  std::int64_t slope = 0;                 // [kKeyBlock], for a softcap
  std::int64_t total = 0;
};

struct AttentionPlan {
  AttentionShape shape;
  AttentionBuffers at;
  std::int64_t dim_n = 0, query_blocks = 0, key_blocks = 0, group = 0;
  Reach reach;
  std::int64_t delta = 0;   // floats before the threads' buffers: sum(out * d_out) [B, H, T]
  float log2_scale = 0.0f;  // scale of log2 scores
  bool changes = false;     // rows of scores go through FinishScores
  bool by_head = false;     // backward: a task owns a kv head
  std::size_t total = 0;    // bytes
};

inline AttentionPlan PlanAttention(const AttentionShape& shape, bool backward) {
  AttentionPlan plan;
  plan.shape = shape;
  plan.dim_n = round_up(shape.dim, FloatGemm::kColumns);
  plan.query_blocks = ceil_div(shape.queries, kQueryBlock);
  plan.key_blocks = ceil_div(shape.keys, kKeyBlock);
  plan.group = shape.heads / shape.kv_heads;
  plan.reach = ReachOf(shape);
  plan.changes = ChangesScores(shape);
  plan.log2_scale =
      plan.changes ? 1.0f : static_cast<float>(static_cast<double>(shape.scale) * kLog2E);
  plan.by_head = shape.dtype == DType::f32 && shape.batch * shape.kv_heads >= shape.threads;
  AttentionBuffers& at = plan.at;
  const auto take = [&](std::int64_t& offset, std::int64_t floats) {
    offset = at.total;
    at.total += round_up(floats, 16);
  };
  const bool copies = shape.dtype != DType::f32;
  constexpr std::int64_t kSlack = FloatGemm::kSlack;
  take(at.q, copies ? kQueryBlock * shape.dim : 0);
  take(at.scores, kQueryBlock * kKeyBlock);
  take(at.k, kKeyBlock * shape.dim + kSlack);
  take(at.v, kKeyBlock * plan.dim_n + kSlack);
  take(at.sum, kQueryBlock * plan.dim_n);
  take(at.row_max, kQueryBlock);
  take(at.row_sum, kQueryBlock);
  if (backward) {
    take(at.d_out, copies ? kQueryBlock * shape.dim : 0);
    take(at.d_scores, kQueryBlock * kKeyBlock);
    take(at.rows, kQueryBlock * plan.dim_n + kSlack);
    take(at.key_rows, kKeyBlock * plan.dim_n + kSlack);
    take(at.sum2, kKeyBlock * plan.dim_n);
    take(at.slope, shape.softcap != 0.0f ? kKeyBlock : 0);
    plan.delta = round_up(shape.batch * shape.heads * shape.queries, 16);
  }
  plan.total =
      static_cast<std::size_t>(plan.delta + at.total * std::max(shape.threads, 1)) * sizeof(float);
  return plan;
}

// Rows [first, first + rows) as the left operand of a GEMM along dim.
inline FloatGemm::Left LeftRows(const HeadRows& x, std::int64_t first, std::int64_t rows,
                                std::int64_t dim, float* copy) {
  const std::int64_t at = x.offset + first * x.stride;
  if (x.dtype == DType::f32) {
    return {static_cast<const float*>(x.data) + at, x.stride, 1, x.stride * FloatGemm::kRows};
  }
  const auto* data = static_cast<const std::uint16_t*>(x.data);
  for (std::int64_t i = 0; i < rows; ++i)
    ToF32(x.dtype, data + at + i * x.stride, copy + i * dim, dim);
  return {copy, dim, 1, dim * FloatGemm::kRows};
}
inline FloatGemm::Left From(FloatGemm::Left x, std::int64_t row) {
  x.data += row * x.row_stride;
  return x;
}
// Rows of a block of scores as left operand, and its transpose: rows are keys, depth is queries.
inline FloatGemm::Left ScoreRows(const float* scores) {
  return {scores, kKeyBlock, 1, kKeyBlock * FloatGemm::kRows};
}
inline FloatGemm::Left ScoreColumns(const float* scores) {
  return {scores, 1, kKeyBlock, FloatGemm::kRows};
}

// Packs rows as the right operand: transposed (depth dim) or not (depth rows).
inline void PackTransposedRows(const HeadRows& x, std::int64_t first, std::int64_t rows,
                               std::int64_t dim, float* to) {
  PackPanels<FloatGemm::kColumns>(x.data, x.dtype, x.offset + first * x.stride, x.stride, 1, rows,
                                  dim, to);
}
inline void PackRows(const HeadRows& x, std::int64_t first, std::int64_t rows, std::int64_t dim,
                     float* to) {
  PackPanels<FloatGemm::kColumns>(x.data, x.dtype, x.offset + first * x.stride, 1, x.stride, dim,
                                  rows, to);
}

// Unmasked part of the block of queries [q0, q0 + rows) and keys [k0, k0 + keys).
struct BlockMask {
  std::int64_t first_row;  // earlier rows see no key of the block; a multiple of FloatGemm::kRows
  std::int64_t diagonal;   // row r sees the first r + diagonal keys
  std::int64_t keys;
  std::int64_t Limit(std::int64_t row) const {
    return std::clamp<std::int64_t>(row + diagonal, 0, keys);
  }
};
inline BlockMask MaskOf(const AttentionPlan& plan, std::int64_t q0, std::int64_t rows,
                        std::int64_t k0, std::int64_t keys) {
  if (!plan.reach.bounded) return {0, keys, keys};
  const std::int64_t diagonal = q0 + plan.reach.last - k0 + 1;
  const std::int64_t first = std::clamp<std::int64_t>(1 - diagonal, 0, rows);
  return {first / FloatGemm::kRows * FloatGemm::kRows, diagonal, keys};
}
// Calls f(row, count, keys) for strips of rows, of which the last row sees `keys` keys. There is
// one strip if every row sees all keys.
template <class F>
HWY_INLINE void ForStrips(const BlockMask& mask, std::int64_t rows, const F& f) {
  static_assert(kStrip % FloatGemm::kRows == 0);
  const bool whole = mask.Limit(mask.first_row) == mask.keys;
  for (std::int64_t r = mask.first_row; r < rows;) {
    const std::int64_t count = whole ? rows - r : std::min(kStrip, rows - r);
    const std::int64_t keys = mask.Limit(r + count - 1);
    if (keys > 0) f(r, count, keys);
    r += count;
  }
}
// scores [rows][kKeyBlock] = x . panels of keys, except masked scores.
inline void MultiplyScores(const BlockMask& mask, std::int64_t rows, const FloatGemm::Left& x,
                           const float* panels, std::int64_t dim, float* scores) {
  ForStrips(mask, rows, [&](std::int64_t r, std::int64_t count, std::int64_t keys) {
    FloatGemm::Block(From(x, r), count, FloatGemm::PackedRight(panels, dim),
                     round_up(keys, FloatGemm::kColumns), dim, scores + r * kKeyBlock, kKeyBlock,
                     false);
  });
}
// to [rows][ld] += scores . rows of keys as panels.
inline void AddScoresTimes(const BlockMask& mask, std::int64_t rows, const float* scores,
                           const float* panels, std::int64_t columns, float* to, std::int64_t ld) {
  ForStrips(mask, rows, [&](std::int64_t r, std::int64_t count, std::int64_t keys) {
    FloatGemm::Block(ScoreRows(scores + r * kKeyBlock), count,
                     FloatGemm::PackedRight(panels, mask.keys), columns, keys, to + r * ld, ld,
                     true);
  });
}
// to [keys][ld] += scores^T . rows [mask.first_row, rows) of queries as panels.
inline void AddScoresTransposedTimes(const BlockMask& mask, std::int64_t rows, const float* scores,
                                     const float* panels, std::int64_t columns, float* to,
                                     std::int64_t ld) {
  const std::int64_t first = mask.first_row;
  for (std::int64_t key = 0; key < mask.keys;) {
    // Every row sees the keys before Limit(first): they are processed together.
    const std::int64_t together = std::max(kStrip, mask.Limit(first) / kStrip * kStrip - key);
    const std::int64_t count = std::min(together, mask.keys - key);
    const std::int64_t start = std::max(first, key + 1 - mask.diagonal);  // the first that sees key
    if (start < rows) {
      FloatGemm::Right right = FloatGemm::PackedRight(panels, rows - first);
      right.data += (start - first) * right.depth_stride;
      FloatGemm::Block(ScoreColumns(scores + start * kKeyBlock + key), count, right, columns,
                       rows - start, to + key * ld, ld, true);
    }
    key += count;
  }
}
// s[limit, n) = -inf, up to a full vector; returns the padded length.
HWY_INLINE std::int64_t MaskRow(float* s, std::int64_t limit, std::int64_t n) {
  const std::int64_t padded = round_up(n, FloatGemm::kColumns);
  std::fill(s + limit, s + padded, -std::numeric_limits<float>::infinity());
  return padded;
}

// Online softmax step: s = 2^(s * scale - top), where top is at least the running maximum. Updates
// the running sum, and returns the factor that rescales earlier sums of the row.
HWY_INLINE float SoftmaxRow(float* HWY_RESTRICT s, std::int64_t limit, std::int64_t n, float scale,
                            float& row_max, float& row_sum) {
  const D d;
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  if (limit == 0) {
    std::fill(s, s + n, 0.0f);
    return 1.0f;
  }
  const V c = hn::Set(d, scale);
  V best = hn::Set(d, kMinusInfinity);
  std::int64_t i = 0;
  for (; i + FloatGemm::kLanes <= limit; i += FloatGemm::kLanes) {
    const V x = hn::Mul(hn::LoadU(d, s + i), c);
    hn::StoreU(x, d, s + i);
    best = hn::Max(best, x);
  }
  float tail = kMinusInfinity;
  for (; i < limit; ++i) {
    s[i] *= scale;
    tail = std::max(tail, s[i]);
  }
  const std::int64_t padded = MaskRow(s, limit, n);
  const float top = std::max({row_max, tail, hn::GetLane(hn::MaxOfLanes(d, best))});
  const float shift = top == kMinusInfinity ? 0.0f : top;
  const V shifts = hn::Set(d, shift);
  V sum = hn::Zero(d);
  for (i = 0; i < padded; i += FloatGemm::kLanes) {
    const V p = Exp2(hn::Sub(hn::LoadU(d, s + i), shifts));
    hn::StoreU(p, d, s + i);
    sum = hn::Add(sum, p);
  }
  const float factor = std::exp2(row_max - shift);
  row_sum = row_sum * factor + hn::GetLane(hn::SumOfLanes(d, sum));
  row_max = top;
  return factor;
}

inline void ForwardTask(const AttentionPlan& plan, std::int64_t b, std::int64_t h, std::int64_t q0,
                        const AttentionOperand& q, const AttentionOperand& k,
                        const AttentionOperand& v, const AttentionOutput& out, float* lse,
                        float* scratch) {
  const AttentionShape& shape = plan.shape;
  const AttentionBuffers& at = plan.at;
  const HeadRows keys = HeadOf(k, shape.dtype, b, h / plan.group);
  const HeadRows values = HeadOf(v, shape.dtype, b, h / plan.group);
  const std::int64_t rows = std::min(kQueryBlock, shape.queries - q0);
  const FloatGemm::Left left =
      LeftRows(HeadOf(q, shape.dtype, b, h), q0, rows, shape.dim, scratch + at.q);
  float* scores = scratch + at.scores;
  float* sum = scratch + at.sum;
  float* row_max = scratch + at.row_max;
  float* row_sum = scratch + at.row_sum;
  std::fill(sum, sum + rows * plan.dim_n, 0.0f);
  StartSoftmax(rows, row_max, row_sum);

  const std::int64_t visible = plan.reach.EndKey(q0 + rows, shape.keys);
  for (std::int64_t k0 = plan.reach.FirstKey(q0, shape.keys, kKeyBlock); k0 < visible;
       k0 += kKeyBlock) {
    const std::int64_t n = std::min(kKeyBlock, visible - k0);
    const BlockMask mask = MaskOf(plan, q0, rows, k0, n);
    PackTransposedRows(keys, k0, n, shape.dim, scratch + at.k);
    MultiplyScores(mask, rows, left, scratch + at.k, shape.dim, scores);
    for (std::int64_t r = mask.first_row; r < rows; ++r) {
      if (plan.changes)
        FinishScores(shape, {b, h, q0 + r, k0}, mask.Limit(r), scores + r * kKeyBlock, nullptr);
      const float factor = SoftmaxRow(scores + r * kKeyBlock, mask.Limit(r), n, plan.log2_scale,
                                      row_max[r], row_sum[r]);
      if (factor != 1.0f) ScaleRow(sum + r * plan.dim_n, plan.dim_n, factor);
    }
    PackRows(values, k0, n, shape.dim, scratch + at.v);
    AddScoresTimes(mask, rows, scores, scratch + at.v, plan.dim_n, sum, plan.dim_n);
  }
  FinishSoftmax(plan, b, h, q0, rows, row_max, row_sum, sum, out, lse);
}

inline void RunAttentionForward(const AttentionShape& shape, const AttentionOperand& q,
                                const AttentionOperand& k, const AttentionOperand& v,
                                const AttentionOutput& out, float* lse, std::byte* scratch) {
  const AttentionPlan plan = PlanAttention(shape, false);
  auto* floats = reinterpret_cast<float*>(scratch);
  ForQueryBlocks(plan, [&](std::int64_t b, std::int64_t h, std::int64_t block, int thread) {
    ForwardTask(plan, b, h, block * kQueryBlock, q, k, v, out, lse,
                floats + thread * plan.at.total);
  });
}

// Turns scores s and gradients g of the probabilities of one row into s = p, g = p (g - delta)
// scale.
HWY_INLINE void GradientRow(float* HWY_RESTRICT s, float* HWY_RESTRICT g, std::int64_t limit,
                            std::int64_t n, float log2_scale, float scale, float lse, float delta) {
  const D d;
  // A row whose scores are all -inf has no gradient.
  if (lse == -std::numeric_limits<float>::infinity()) limit = 0;
  const std::int64_t padded = round_up(n, FloatGemm::kColumns);
  const V c = hn::Set(d, log2_scale), f = hn::Set(d, scale), minus = hn::Set(d, delta);
  const V shift = hn::Set(d, lse * kLog2EFloat);
  const std::int64_t used = std::min(padded, round_up(limit, FloatGemm::kLanes));
  for (std::int64_t i = 0; i < used; i += FloatGemm::kLanes) {
    const V p = Exp2(hn::MulSub(hn::LoadU(d, s + i), c, shift));
    hn::StoreU(p, d, s + i);
    hn::StoreU(hn::Mul(hn::Mul(p, f), hn::Sub(hn::LoadU(d, g + i), minus)), d, g + i);
  }
  std::fill(s + limit, s + padded, 0.0f);
  std::fill(g + limit, g + padded, 0.0f);
}

// Computes probabilities and score gradients of one block into at.scores and at.d_scores, from the
// panels at.k and at.v.
inline BlockMask GradientBlock(const AttentionPlan& plan, const BackwardOperands& x, std::int64_t b,
                               std::int64_t h, std::int64_t q0, std::int64_t rows, std::int64_t k0,
                               std::int64_t n, const FloatGemm::Left& q,
                               const FloatGemm::Left& d_out, float* scratch) {
  const AttentionShape& shape = plan.shape;
  const AttentionBuffers& at = plan.at;
  const BlockMask mask = MaskOf(plan, q0, rows, k0, n);
  float* scores = scratch + at.scores;
  float* d_scores = scratch + at.d_scores;
  MultiplyScores(mask, rows, q, scratch + at.k, shape.dim, scores);
  MultiplyScores(mask, rows, d_out, scratch + at.v, shape.dim, d_scores);
  const std::int64_t token = (b * shape.heads + h) * shape.queries + q0;
  for (std::int64_t r = mask.first_row; r < rows; ++r) {
    float* s = scores + r * kKeyBlock;
    float* g = d_scores + r * kKeyBlock;
    float delta = x.delta[token + r];
    if (plan.changes)
      FinishGradients(shape, {b, h, q0 + r, k0}, mask.Limit(r), s, g, scratch + at.slope, delta);
    GradientRow(s, g, mask.Limit(r), n, plan.log2_scale, shape.scale, x.lse[token + r], delta);
  }
  return mask;
}

inline void QueryTask(const AttentionPlan& plan, const BackwardOperands& x, std::int64_t b,
                      std::int64_t h, std::int64_t q0, float* scratch) {
  const AttentionShape& shape = plan.shape;
  const AttentionBuffers& at = plan.at;
  const QueryTaskRows task = RowsOfQueries(plan, x, b, h, q0, kQueryBlock, kKeyBlock);
  const std::int64_t rows = task.rows;
  const auto q = LeftRows(task.q, q0, rows, shape.dim, scratch + at.q);
  const auto d_out = LeftRows(task.d_out, q0, rows, shape.dim, scratch + at.d_out);
  float* sum = scratch + at.sum;
  std::fill(sum, sum + rows * plan.dim_n, 0.0f);
  for (std::int64_t k0 = task.first_key; k0 < task.end_key; k0 += kKeyBlock) {
    // Same full blocks as KeyTask, so the sums are the same.
    const std::int64_t n = std::min(kKeyBlock, shape.keys - k0);
    PackTransposedRows(task.keys, k0, n, shape.dim, scratch + at.k);
    PackTransposedRows(task.values, k0, n, shape.dim, scratch + at.v);
    PackRows(task.keys, k0, n, shape.dim, scratch + at.key_rows);
    const BlockMask mask = GradientBlock(plan, x, b, h, q0, rows, k0, n, q, d_out, scratch);
    AddScoresTimes(mask, rows, scratch + at.d_scores, scratch + at.key_rows, plan.dim_n, sum,
                   plan.dim_n);
  }
  StoreRows(x.dq, shape, b, h, q0, rows, sum, plan.dim_n);
}

// Computes dk and dv of a block of keys; with plan.by_head its part of dq too.
inline void KeyTask(const AttentionPlan& plan, const BackwardOperands& x, std::int64_t b,
                    std::int64_t kv_head, std::int64_t k0, float* scratch) {
  const AttentionShape& shape = plan.shape;
  const AttentionBuffers& at = plan.at;
  const std::int64_t n = std::min(kKeyBlock, shape.keys - k0);
  const HeadRows keys = HeadOf(x.k, shape.dtype, b, kv_head);
  PackTransposedRows(keys, k0, n, shape.dim, scratch + at.k);
  PackTransposedRows(HeadOf(x.v, shape.dtype, b, kv_head), k0, n, shape.dim, scratch + at.v);
  if (plan.by_head) PackRows(keys, k0, n, shape.dim, scratch + at.key_rows);
  float* dk = scratch + at.sum;
  float* dv = scratch + at.sum2;
  std::fill(dk, dk + n * plan.dim_n, 0.0f);
  std::fill(dv, dv + n * plan.dim_n, 0.0f);
  const std::int64_t first_query = plan.reach.FirstQuery(k0, shape.queries, kQueryBlock);
  const std::int64_t end_query = plan.reach.EndQuery(k0 + n, shape.queries);
  for (std::int64_t h = kv_head * plan.group; h < (kv_head + 1) * plan.group; ++h) {
    const HeadRows q = HeadOf(x.q, shape.dtype, b, h);
    const HeadRows d_out = HeadOf(x.d_out, shape.dtype, b, h);
    for (std::int64_t q0 = first_query; q0 < end_query; q0 += kQueryBlock) {
      const std::int64_t rows = std::min(kQueryBlock, shape.queries - q0);
      const BlockMask mask = GradientBlock(
          plan, x, b, h, q0, rows, k0, n, LeftRows(q, q0, rows, shape.dim, scratch + at.q),
          LeftRows(d_out, q0, rows, shape.dim, scratch + at.d_out), scratch);
      const std::int64_t first = q0 + mask.first_row, depth = rows - mask.first_row;
      if (depth == 0) continue;
      float* panels = scratch + at.rows;
      const float* d_scores = scratch + at.d_scores;
      PackRows(d_out, first, depth, shape.dim, panels);
      AddScoresTransposedTimes(mask, rows, scratch + at.scores, panels, plan.dim_n, dv, plan.dim_n);
      PackRows(q, first, depth, shape.dim, panels);
      AddScoresTransposedTimes(mask, rows, d_scores, panels, plan.dim_n, dk, plan.dim_n);
      if (plan.by_head) {
        float* dq = static_cast<float*>(x.dq.data) + b * x.dq.stride_b + h * x.dq.stride_h +
                    q0 * x.dq.stride_t;
        AddScoresTimes(mask, rows, d_scores, scratch + at.key_rows, shape.dim, dq, x.dq.stride_t);
      }
    }
  }
  StoreRows(x.dk, shape, b, kv_head, k0, n, dk, plan.dim_n);
  StoreRows(x.dv, shape, b, kv_head, k0, n, dv, plan.dim_n);
}

inline void RunAttentionBackward(const AttentionShape& shape, const AttentionOperand& q,
                                 const AttentionOperand& k, const AttentionOperand& v,
                                 const AttentionOperand& out, const AttentionOperand& d_out,
                                 const float* lse, const AttentionOutput& dq,
                                 const AttentionOutput& dk, const AttentionOutput& dv,
                                 std::byte* scratch) {
  const AttentionPlan plan = PlanAttention(shape, true);
  auto* delta = reinterpret_cast<float*>(scratch);
  const BackwardOperands x{q, k, v, out, d_out, lse, delta, dq, dk, dv};
  const auto buffers = [&](int thread) { return delta + plan.delta + thread * plan.at.total; };
  ForBackwardTasks(
      plan,
      [&](std::int64_t b, std::int64_t h, std::int64_t block, int thread) {
        const std::int64_t q0 = block * kQueryBlock;
        const std::int64_t end = std::min(q0 + kQueryBlock, shape.queries);
        SumProducts(HeadOf(out, shape.dtype, b, h), HeadOf(d_out, shape.dtype, b, h), q0, end,
                    shape.dim, buffers(thread) + plan.at.scores, buffers(thread) + plan.at.sum,
                    delta + (b * shape.heads + h) * shape.queries);
        for (std::int64_t t = q0; t < end && plan.by_head; ++t) {
          float* row =
              static_cast<float*>(dq.data) + b * dq.stride_b + h * dq.stride_h + t * dq.stride_t;
          std::fill(row, row + shape.dim, 0.0f);
        }
      },
      [&](std::int64_t b, std::int64_t kv_head, int thread) {
        for (std::int64_t k0 = 0; k0 < shape.keys; k0 += kKeyBlock)
          KeyTask(plan, x, b, kv_head, k0, buffers(thread));
      },
      [&](std::int64_t b, std::int64_t kv_head, std::int64_t block, int thread) {
        KeyTask(plan, x, b, kv_head, block * kKeyBlock, buffers(thread));
      },
      [&](std::int64_t b, std::int64_t h, std::int64_t block, int thread) {
        QueryTask(plan, x, b, h, block * kQueryBlock, buffers(thread));
      });
}

inline std::size_t AttentionScratch(const AttentionShape& shape, bool backward) {
  return PlanAttention(shape, backward).total;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

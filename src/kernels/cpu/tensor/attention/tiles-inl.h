// Fused attention of bf16 by bf16_tiles-inl.h: blocks of queries x keys as in attention-inl.h. The
// scores of one panel of 32 queries at a time stay in L1.
//
// Scores, softmax and every sum are fp32; probabilities and score gradients are rounded to bf16 for
// their GEMMs. Backward: a task owns (b, kv head, key block) for dk and dv. These accumulate
// transposed, so that probabilities are the right operand as computed. Another task owns (b, h,
// query block) for dq. With enough kv heads and a small fp32 dq, a task owns a kv head, and scores
// are recomputed once. The sums are the same either way.
#if defined(LOGITLESS_TENSOR_ATTENTION_TILES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_TENSOR_ATTENTION_TILES_INL_H
#undef LOGITLESS_TENSOR_ATTENTION_TILES_INL_H
#else
#define LOGITLESS_TENSOR_ATTENTION_TILES_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/bf16_tiles-inl.h"
#include "kernels/cpu/tensor/attention/attention-inl.h"
#include "kernels/cpu/tensor/attention/tasks-inl.h"
#include "kernels/cpu/tensor/gemm-inl.h"
#include "kernels/cpu_head.h"
#include "kernels/cpu_tensor.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

inline constexpr std::int64_t kSide = 32;                 // rows, columns and k of a micro-kernel
inline constexpr std::int64_t kSideElements = 2 * kTile;  // elements of a panel's step of 32 k
inline constexpr std::int64_t kTileQueries = 256, kTileKeys = 128;  // of a block
inline constexpr std::int64_t kQuerySteps = kTileQueries / kSide, kKeySteps = kTileKeys / kSide;
inline constexpr std::size_t kMostHeadBytes = std::size_t{4} << 20;  // of a thread's fp32 dq

// Layout of a thread's scratch, in bytes.
struct TileAttentionBuffers {
  std::size_t scores = 0, d_scores = 0;          // fp32 [32][kTileKeys]
  std::size_t q = 0, d_out = 0;                  // left panels: queries, k: dim
  std::size_t q_columns = 0, d_out_columns = 0;  // left panels: dim, k: queries
  std::size_t k = 0, v = 0;                      // right panels: keys, k: dim
  std::size_t rows = 0;                  // right panels: dim, k: keys. Of v forward, of k backward
  std::size_t left = 0;                  // one left panel of p or d_scores: k: keys
  std::size_t p = 0, d_s = 0;            // right panels: keys, k: queries
  std::size_t sum = 0;                   // fp32 [kTileQueries][dim_n], by_head [group][T][dim_n]
  std::size_t dk = 0, dv = 0;            // fp32 [dim_n][kTileKeys]
  std::size_t row_max = 0, row_sum = 0;  // fp32 [kTileQueries]
  std::size_t rows_out = 0;              // fp32 [16][dim_n]
  std::size_t slope = 0;                 // fp32 [kTileKeys], for a softcap
  std::size_t total = 0;
};

struct TileAttentionPlan {
  AttentionShape shape;
  TileAttentionBuffers at;
  std::int64_t dim_steps = 0, dim_n = 0;  // dim in steps of 32, and padded to them
  std::int64_t query_blocks = 0, key_blocks = 0, group = 0;
  std::int64_t head_rows = 0;  // queries padded to full panels
  Reach reach;
  float log2_scale = 0.0f;  // scale of log2 scores
  bool changes = false;     // rows of scores go through FinishScores
  bool by_head = false;     // backward: a task owns a kv head
  std::size_t delta = 0;    // bytes before the threads' buffers: sum(out * d_out) [B, H, T]
  std::size_t total = 0;
};

inline TileAttentionPlan PlanTileAttention(const AttentionShape& shape, bool backward) {
  TileAttentionPlan plan;
  plan.shape = shape;
  plan.dim_steps = ceil_div(shape.dim, kSide);
  plan.dim_n = plan.dim_steps * kSide;
  plan.query_blocks = ceil_div(shape.queries, kTileQueries);
  plan.key_blocks = ceil_div(shape.keys, kTileKeys);
  plan.group = shape.heads / shape.kv_heads;
  plan.head_rows = round_up(shape.queries, kSide);
  plan.reach = ReachOf(shape);
  plan.changes = ChangesScores(shape);
  plan.log2_scale =
      plan.changes ? 1.0f : static_cast<float>(static_cast<double>(shape.scale) * kLog2E);
  const std::size_t head_bytes =
      static_cast<std::size_t>(plan.group * plan.head_rows * plan.dim_n) * sizeof(float);
  plan.by_head = shape.batch * shape.kv_heads >= shape.threads && head_bytes <= kMostHeadBytes;
  TileAttentionBuffers& at = plan.at;
  const auto bytes = [](std::size_t size) { return (size + 63) / 64 * 64; };
  const auto take = [&](std::size_t& offset, std::int64_t elements, std::size_t size) {
    offset = at.total;
    at.total += bytes(static_cast<std::size_t>(elements) * size);
  };
  const auto floats = [&](std::size_t& offset, std::int64_t n) { take(offset, n, sizeof(float)); };
  const auto panels = [&](std::size_t& offset, std::int64_t steps) {
    take(offset, steps * kSideElements, sizeof(std::uint16_t));
  };
  floats(at.scores, kSide * kTileKeys);
  panels(at.q, kQuerySteps * plan.dim_steps);
  panels(at.k, kKeySteps * plan.dim_steps);
  panels(at.rows, kKeySteps * plan.dim_steps);
  panels(at.left, kKeySteps);
  if (backward) {
    floats(at.d_scores, kSide * kTileKeys);
    panels(at.d_out, kQuerySteps * plan.dim_steps);
    panels(at.q_columns, kQuerySteps * plan.dim_steps);
    panels(at.d_out_columns, kQuerySteps * plan.dim_steps);
    panels(at.v, kKeySteps * plan.dim_steps);
    panels(at.p, kQuerySteps * kKeySteps);
    panels(at.d_s, kQuerySteps * kKeySteps);
    floats(at.dk, plan.dim_n * kTileKeys);
    floats(at.dv, plan.dim_n * kTileKeys);
    floats(at.rows_out, 16 * plan.dim_n);
    floats(at.slope, shape.softcap != 0.0f ? kTileKeys : 0);
    plan.delta =
        bytes(static_cast<std::size_t>(shape.batch * shape.heads * shape.queries) * sizeof(float));
  } else {
    floats(at.row_max, kTileQueries);
    floats(at.row_sum, kTileQueries);
  }
  if (backward && plan.by_head) {
    floats(at.sum, plan.group * plan.head_rows * plan.dim_n);
  } else {
    floats(at.sum, kTileQueries * plan.dim_n);
  }
  plan.total = plan.delta + at.total * static_cast<std::size_t>(std::max(shape.threads, 1));
  return plan;
}

// Packs rows of a head into panels. "Rows": they are the panels' rows or columns, and dim is k.
// "Columns": dim is the rows or columns, and they are k.
template <class Tiles>
struct HeadPanels {
  using Gemm = TileGemm<Tiles>;
  static GemmOperand Operand(const HeadRows& x, std::int64_t row_stride, std::int64_t col_stride) {
    return {x.data, x.dtype, 0, row_stride, col_stride};
  }
  static void LeftRows(const HeadRows& x, std::int64_t first, std::int64_t rows, std::int64_t dim,
                       std::uint16_t* to) {
    Gemm::PackA(Operand(x, x.stride, 1), x.offset + first * x.stride, rows, dim, to);
  }
  static void LeftColumns(const HeadRows& x, std::int64_t first, std::int64_t rows,
                          std::int64_t dim, std::uint16_t* to) {
    Gemm::PackA(Operand(x, 1, x.stride), x.offset + first * x.stride, dim, rows, to);
  }
  static void RightRows(const HeadRows& x, std::int64_t first, std::int64_t rows, std::int64_t dim,
                        std::uint16_t* to) {
    Gemm::PackB(Operand(x, 1, x.stride), x.offset + first * x.stride, rows, dim, to);
  }
  static void RightColumns(const HeadRows& x, std::int64_t first, std::int64_t rows,
                           std::int64_t dim, std::uint16_t* to) {
    Gemm::PackB(Operand(x, x.stride, 1), x.offset + first * x.stride, dim, rows, to);
  }
};

// c [32][32 panels] (+)= a . b: one panel of a, panels of b, `capacity` steps of k apart.
template <class Tiles>
HWY_INLINE void MultiplyPanels(const std::uint16_t* a, const std::uint16_t* b,
                               std::int64_t capacity, std::int64_t panels, std::int64_t steps,
                               float* c, std::int64_t ldc, bool add) {
  for (std::int64_t j = 0; j < panels; ++j) {
    Tiles::Multiply(a, kSideElements, b + j * capacity * kSideElements, kSideElements, steps,
                    c + j * kSide, ldc, add);
  }
}

// Mask of a block: query row r sees the first r + diagonal keys.
struct TileMask {
  std::int64_t diagonal, rows, keys;
  std::int64_t Limit(std::int64_t row) const {
    return std::clamp<std::int64_t>(row + diagonal, 0, keys);
  }
  // Steps of 32 keys that some row of panel i sees, and the first panel that sees any key of step
  // j.
  std::int64_t KeySteps(std::int64_t i) const {
    return ceil_div(Limit(std::min(i * kSide + kSide, rows) - 1), kSide);
  }
  std::int64_t FirstPanel(std::int64_t j) const {
    const std::int64_t row = std::max<std::int64_t>(0, j * kSide + 1 - diagonal);
    return row < rows ? row / kSide : ceil_div(rows, kSide);
  }
};
inline TileMask TileMaskOf(const TileAttentionPlan& plan, std::int64_t q0, std::int64_t rows,
                           std::int64_t k0, std::int64_t keys) {
  return {plan.reach.bounded ? q0 + plan.reach.last - k0 + 1 : keys, rows, keys};
}
// Online softmax step on a row's first `limit` scores: p = 2^(s * scale - top), 0 from there to
// `end`, where top is at least the running maximum. Updates the running sum. p is a row of a left
// panel. Returns the factor that rescales earlier sums of the row.
template <class Bf16>
HWY_INLINE float SoftmaxTileRow(const float* HWY_RESTRICT s, std::int64_t limit, std::int64_t end,
                                float scale, float& row_max, float& row_sum,
                                std::uint16_t* HWY_RESTRICT p) {
  const D d;
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  constexpr auto kLanes = static_cast<std::int64_t>(kMaxLanes);
  const auto store = [&](V x, std::int64_t i)
                         HWY_ATTR { Bf16::Store(x, p + i / kSide * kSideElements + i % kSide); };
  const std::int64_t whole = limit / kLanes * kLanes;
  const auto part = hn::FirstN(d, static_cast<std::size_t>(limit - whole));
  const V c = hn::Set(d, scale);
  float factor = 1.0f;
  if (limit > 0) {
    V best = hn::Set(d, kMinusInfinity);
    for (std::int64_t i = 0; i < whole; i += kLanes)
      best = hn::Max(best, hn::Mul(hn::LoadU(d, s + i), c));
    if (whole < limit) {
      best = hn::Max(best, hn::IfThenElse(part, hn::Mul(hn::LoadU(d, s + whole), c),
                                          hn::Set(d, kMinusInfinity)));
    }
    const float top = std::max(row_max, hn::GetLane(hn::MaxOfLanes(d, best)));
    const float shift = top == kMinusInfinity ? 0.0f : top;
    const V shifts = hn::Set(d, shift);
    V sum = hn::Zero(d);
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      const V x = Exp2(hn::MulSub(hn::LoadU(d, s + i), c, shifts));
      sum = hn::Add(sum, x);
      store(x, i);
    }
    if (whole < limit) {
      const V x = hn::IfThenElseZero(part, Exp2(hn::MulSub(hn::LoadU(d, s + whole), c, shifts)));
      sum = hn::Add(sum, x);
      store(x, whole);
    }
    if (row_max != top || top == kMinusInfinity) factor = std::exp2(row_max - shift);
    row_sum = row_sum * factor + hn::GetLane(hn::SumOfLanes(d, sum));
    row_max = top;
  }
  for (std::int64_t i = round_up(limit, kLanes); i < end; i += kLanes) store(hn::Zero(d), i);
  return factor;
}

template <class Tiles>
void TileForwardTask(const TileAttentionPlan& plan, std::int64_t b, std::int64_t h, std::int64_t q0,
                     const AttentionOperand& q, const AttentionOperand& k,
                     const AttentionOperand& v, const AttentionOutput& out, float* lse,
                     std::byte* scratch) {
  using Panels = HeadPanels<Tiles>;
  [[maybe_unused]] const typename Tiles::Session session;
  const AttentionShape& shape = plan.shape;
  const TileAttentionBuffers& at = plan.at;
  const auto panels = [&](std::size_t x) { return reinterpret_cast<std::uint16_t*>(scratch + x); };
  const auto floats = [&](std::size_t x) { return reinterpret_cast<float*>(scratch + x); };
  const HeadRows keys = HeadOf(k, shape.dtype, b, h / plan.group);
  const HeadRows values = HeadOf(v, shape.dtype, b, h / plan.group);
  const std::int64_t rows = std::min(kTileQueries, shape.queries - q0);
  float* scores = floats(at.scores);
  float* sum = floats(at.sum);
  float* row_max = floats(at.row_max);
  float* row_sum = floats(at.row_sum);
  std::fill(sum, sum + round_up(rows, kSide) * plan.dim_n, 0.0f);
  StartSoftmax(rows, row_max, row_sum);
  Panels::LeftRows(HeadOf(q, shape.dtype, b, h), q0, rows, shape.dim, panels(at.q));

  const std::int64_t visible = plan.reach.EndKey(q0 + rows, shape.keys);
  for (std::int64_t k0 = plan.reach.FirstKey(q0, shape.keys, kTileKeys); k0 < visible;
       k0 += kTileKeys) {
    const std::int64_t n = std::min(kTileKeys, visible - k0);
    const TileMask mask = TileMaskOf(plan, q0, rows, k0, n);
    Panels::RightRows(keys, k0, n, shape.dim, panels(at.k));
    Panels::RightColumns(values, k0, n, shape.dim, panels(at.rows));
    for (std::int64_t i = mask.FirstPanel(0); i * kSide < rows; ++i) {
      const std::int64_t steps = mask.KeySteps(i);
      MultiplyPanels<Tiles>(panels(at.q) + i * plan.dim_steps * kSideElements, panels(at.k),
                            plan.dim_steps, steps, plan.dim_steps, scores, kTileKeys, false);
      for (std::int64_t r = i * kSide; r < std::min(rows, (i + 1) * kSide); ++r) {
        float* row = scores + r % kSide * kTileKeys;
        if (plan.changes) FinishScores(shape, {b, h, q0 + r, k0}, mask.Limit(r), row, nullptr);
        const float factor = SoftmaxTileRow<typename Tiles::Bf16>(
            row, mask.Limit(r), steps * kSide, plan.log2_scale, row_max[r], row_sum[r],
            panels(at.left) + r % kSide * kSide);
        if (factor != 1.0f) ScaleRow(sum + r * plan.dim_n, plan.dim_n, factor);
      }
      MultiplyPanels<Tiles>(panels(at.left), panels(at.rows), ceil_div(n, kSide), plan.dim_steps,
                            steps, sum + i * kSide * plan.dim_n, plan.dim_n, true);
    }
  }
  FinishSoftmax(plan, b, h, q0, rows, row_max, row_sum, sum, out, lse);
}

// Per-row inputs of the score gradient: number of keys seen, log2 lse, delta.
struct RowTerms {
  std::int64_t limit = 0;
  float shift = 0.0f, delta = 0.0f;
};

// Turns scores s and gradients g of the probabilities, [2][kTileKeys], into p and p (g - delta)
// scale of two rows, 0 from their limits to `end`. p, d_s: pairs of the rows in right panels with a
// capacity of kQuerySteps. left: the rows of p (g - delta) scale in a left panel.
template <class Bf16>
HWY_INLINE void GradientTileRows(const float* HWY_RESTRICT s, const float* HWY_RESTRICT g,
                                 const RowTerms (&rows)[2], std::int64_t end, float log2_scale,
                                 float scale, std::uint16_t* HWY_RESTRICT p,
                                 std::uint16_t* HWY_RESTRICT d_s,
                                 std::uint16_t* HWY_RESTRICT left) {
  const D d;
  const DU du;
  constexpr auto kLanes = static_cast<std::int64_t>(kMaxLanes);
  const V c = hn::Set(d, log2_scale), f = hn::Set(d, scale);
  for (std::int64_t i = 0; i < end; i += kLanes) {
    V probability[2], gradient[2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const V x = hn::MulSub(hn::LoadU(d, s + r * kTileKeys + i), c, hn::Set(d, rows[r].shift));
      V y = Exp2(x);
      V z = hn::Mul(hn::Mul(y, f),
                    hn::Sub(hn::LoadU(d, g + r * kTileKeys + i), hn::Set(d, rows[r].delta)));
      if (i + kLanes > rows[r].limit) {
        const auto seen =
            hn::FirstN(d, static_cast<std::size_t>(std::max<std::int64_t>(rows[r].limit - i, 0)));
        y = hn::IfThenElseZero(seen, y);
        z = hn::IfThenElseZero(seen, z);
      }
      probability[r] = y;
      gradient[r] = z;
    }
    const std::int64_t step = i / kSide;
    const std::int64_t pair =
        step * kQuerySteps * kSideElements + i % kSide / 16 * kTile + i % 16 * 2;
    hn::StoreU(Bf16::Pair(probability[0], probability[1]), du,
               reinterpret_cast<std::uint32_t*>(p + pair));
    hn::StoreU(Bf16::Pair(gradient[0], gradient[1]), du,
               reinterpret_cast<std::uint32_t*>(d_s + pair));
    std::uint16_t* row = left + step * kSideElements + i % kSide;
    Bf16::Store(gradient[0], row);
    Bf16::Store(gradient[1], row + kSide);
  }
}

// Computes probabilities and score gradients of panel i of a block. Reads the panels at.q,
// at.d_out, at.k and at.v; writes at.p, at.d_s and at.left. `block`: the block's first query and
// key.
template <class Tiles>
void TileGradientPanel(const TileAttentionPlan& plan, const BackwardOperands& x,
                       const TileMask& mask, std::int64_t i, const ScoreRow& block,
                       std::byte* scratch) {
  const AttentionShape& shape = plan.shape;
  const TileAttentionBuffers& at = plan.at;
  const auto panels = [&](std::size_t y) { return reinterpret_cast<std::uint16_t*>(scratch + y); };
  float* scores = reinterpret_cast<float*>(scratch + at.scores);
  float* d_scores = reinterpret_cast<float*>(scratch + at.d_scores);
  const std::int64_t token = (block.b * shape.heads + block.h) * shape.queries + block.t;
  const std::int64_t steps = mask.KeySteps(i), first = i * plan.dim_steps * kSideElements;
  MultiplyPanels<Tiles>(panels(at.q) + first, panels(at.k), plan.dim_steps, steps, plan.dim_steps,
                        scores, kTileKeys, false);
  MultiplyPanels<Tiles>(panels(at.d_out) + first, panels(at.v), plan.dim_steps, steps,
                        plan.dim_steps, d_scores, kTileKeys, false);
  const auto terms = [&](std::int64_t r) -> RowTerms {
    // A row whose scores are all -inf has no gradient.
    if (r >= mask.rows || x.lse[token + r] == -std::numeric_limits<float>::infinity()) return {};
    RowTerms row = {mask.Limit(r), x.lse[token + r] * kLog2EFloat, x.delta[token + r]};
    if (plan.changes) {
      const std::int64_t at_row = r % kSide * kTileKeys;
      FinishGradients(shape, {block.b, block.h, block.t + r, block.k0}, row.limit, scores + at_row,
                      d_scores + at_row, reinterpret_cast<float*>(scratch + at.slope), row.delta);
    }
    return row;
  };
  for (std::int64_t r = 0; r < kSide; r += 2) {
    const RowTerms rows[2] = {terms(i * kSide + r), terms(i * kSide + r + 1)};
    const std::int64_t pair = i * kSideElements + r / 2 * kSide;
    GradientTileRows<typename Tiles::Bf16>(
        scores + r * kTileKeys, d_scores + r * kTileKeys, rows, steps * kSide, plan.log2_scale,
        shape.scale, panels(at.p) + pair, panels(at.d_s) + pair, panels(at.left) + r * kSide);
  }
}

template <class Tiles>
void TileQueryTask(const TileAttentionPlan& plan, const BackwardOperands& x, std::int64_t b,
                   std::int64_t h, std::int64_t q0, std::byte* scratch) {
  using Panels = HeadPanels<Tiles>;
  [[maybe_unused]] const typename Tiles::Session session;
  const AttentionShape& shape = plan.shape;
  const TileAttentionBuffers& at = plan.at;
  const auto panels = [&](std::size_t y) { return reinterpret_cast<std::uint16_t*>(scratch + y); };
  const QueryTaskRows task = RowsOfQueries(plan, x, b, h, q0, kTileQueries, kTileKeys);
  const std::int64_t rows = task.rows;
  Panels::LeftRows(task.q, q0, rows, shape.dim, panels(at.q));
  Panels::LeftRows(task.d_out, q0, rows, shape.dim, panels(at.d_out));
  float* sum = reinterpret_cast<float*>(scratch + at.sum);
  std::fill(sum, sum + round_up(rows, kSide) * plan.dim_n, 0.0f);
  for (std::int64_t k0 = task.first_key; k0 < task.end_key; k0 += kTileKeys) {
    // Same full blocks as TileKeyTask, so the sums are the same.
    const std::int64_t n = std::min(kTileKeys, shape.keys - k0);
    const TileMask mask = TileMaskOf(plan, q0, rows, k0, n);
    Panels::RightRows(task.keys, k0, n, shape.dim, panels(at.k));
    Panels::RightRows(task.values, k0, n, shape.dim, panels(at.v));
    Panels::RightColumns(task.keys, k0, n, shape.dim, panels(at.rows));
    for (std::int64_t i = mask.FirstPanel(0); i * kSide < rows; ++i) {
      TileGradientPanel<Tiles>(plan, x, mask, i, {b, h, q0, k0}, scratch);
      MultiplyPanels<Tiles>(panels(at.left), panels(at.rows), ceil_div(n, kSide), plan.dim_steps,
                            mask.KeySteps(i), sum + i * kSide * plan.dim_n, plan.dim_n, true);
    }
  }
  StoreRows(x.dq, shape, b, h, q0, rows, sum, plan.dim_n);
}

// Stores dk or dv of keys [k0, k0 + n) from sums [dim_n][kTileKeys], through `rows` [16][dim_n].
inline void StoreTransposed(const TileAttentionPlan& plan, const AttentionOutput& to,
                            std::int64_t offset, std::int64_t n, const float* sums, float* rows) {
  for (std::int64_t j = 0; j < n; j += 16) {
    for (std::int64_t i = 0; i < plan.dim_n; i += 16)
      TransposeWords(sums + i * kTileKeys + j, kTileKeys, rows + i, plan.dim_n);
    for (std::int64_t r = j; r < std::min(n, j + 16); ++r)
      StoreRow(to, plan.shape.dtype, offset + r * to.stride_t, rows + (r - j) * plan.dim_n,
               plan.shape.dim);
  }
}

// Computes dk and dv of a block of keys; with plan.by_head also its part of dq, in at.sum.
template <class Tiles>
void TileKeyTask(const TileAttentionPlan& plan, const BackwardOperands& x, std::int64_t b,
                 std::int64_t kv_head, std::int64_t k0, std::byte* scratch) {
  using Panels = HeadPanels<Tiles>;
  [[maybe_unused]] const typename Tiles::Session session;
  const AttentionShape& shape = plan.shape;
  const TileAttentionBuffers& at = plan.at;
  const auto panels = [&](std::size_t y) { return reinterpret_cast<std::uint16_t*>(scratch + y); };
  const auto floats = [&](std::size_t y) { return reinterpret_cast<float*>(scratch + y); };
  const std::int64_t n = std::min(kTileKeys, shape.keys - k0), key_steps = ceil_div(n, kSide);
  const HeadRows keys = HeadOf(x.k, shape.dtype, b, kv_head);
  Panels::RightRows(keys, k0, n, shape.dim, panels(at.k));
  Panels::RightRows(HeadOf(x.v, shape.dtype, b, kv_head), k0, n, shape.dim, panels(at.v));
  if (plan.by_head) Panels::RightColumns(keys, k0, n, shape.dim, panels(at.rows));
  float* dk = floats(at.dk);
  float* dv = floats(at.dv);
  std::fill(dk, dk + plan.dim_n * kTileKeys, 0.0f);
  std::fill(dv, dv + plan.dim_n * kTileKeys, 0.0f);
  const std::int64_t first_query = plan.reach.FirstQuery(k0, shape.queries, kSide);
  const std::int64_t end_query = plan.reach.EndQuery(k0 + n, shape.queries);
  for (std::int64_t h = kv_head * plan.group; h < (kv_head + 1) * plan.group; ++h) {
    const HeadRows q = HeadOf(x.q, shape.dtype, b, h);
    const HeadRows d_out = HeadOf(x.d_out, shape.dtype, b, h);
    float* dq = floats(at.sum) + (h - kv_head * plan.group) * plan.head_rows * plan.dim_n;
    for (std::int64_t q0 = first_query; q0 < end_query; q0 += kTileQueries) {
      const std::int64_t rows = std::min(kTileQueries, shape.queries - q0);
      const std::int64_t row_steps = ceil_div(rows, kSide);
      const TileMask mask = TileMaskOf(plan, q0, rows, k0, n);
      Panels::LeftRows(q, q0, rows, shape.dim, panels(at.q));
      Panels::LeftRows(d_out, q0, rows, shape.dim, panels(at.d_out));
      Panels::LeftColumns(q, q0, rows, shape.dim, panels(at.q_columns));
      Panels::LeftColumns(d_out, q0, rows, shape.dim, panels(at.d_out_columns));
      for (std::int64_t i = mask.FirstPanel(0); i < row_steps; ++i) {
        TileGradientPanel<Tiles>(plan, x, mask, i, {b, h, q0, k0}, scratch);
        if (!plan.by_head) continue;
        MultiplyPanels<Tiles>(panels(at.left), panels(at.rows), key_steps, plan.dim_steps,
                              mask.KeySteps(i), dq + (q0 + i * kSide) * plan.dim_n, plan.dim_n,
                              true);
      }
      for (std::int64_t j = 0; j < key_steps; ++j) {
        const std::int64_t first = mask.FirstPanel(j);
        if (first >= row_steps) continue;
        const std::int64_t right = (j * kQuerySteps + first) * kSideElements;
        for (std::int64_t i = 0; i < plan.dim_steps; ++i) {
          const std::int64_t left = (i * row_steps + first) * kSideElements;
          const std::int64_t to = i * kSide * kTileKeys + j * kSide;
          Tiles::Multiply(panels(at.d_out_columns) + left, kSideElements, panels(at.p) + right,
                          kSideElements, row_steps - first, dv + to, kTileKeys, true);
          Tiles::Multiply(panels(at.q_columns) + left, kSideElements, panels(at.d_s) + right,
                          kSideElements, row_steps - first, dk + to, kTileKeys, true);
        }
      }
    }
  }
  const auto offset = [&](const AttentionOutput& to) {
    return b * to.stride_b + kv_head * to.stride_h + k0 * to.stride_t;
  };
  StoreTransposed(plan, x.dk, offset(x.dk), n, dk, floats(at.rows_out));
  StoreTransposed(plan, x.dv, offset(x.dv), n, dv, floats(at.rows_out));
}

// Computes all gradients of a kv head and its query heads.
template <class Tiles>
void TileHeadTask(const TileAttentionPlan& plan, const BackwardOperands& x, std::int64_t b,
                  std::int64_t kv_head, std::byte* scratch) {
  const AttentionShape& shape = plan.shape;
  float* sum = reinterpret_cast<float*>(scratch + plan.at.sum);
  std::fill(sum, sum + plan.group * plan.head_rows * plan.dim_n, 0.0f);
  for (std::int64_t k0 = 0; k0 < shape.keys; k0 += kTileKeys)
    TileKeyTask<Tiles>(plan, x, b, kv_head, k0, scratch);
  for (std::int64_t g = 0; g < plan.group; ++g) {
    StoreRows(x.dq, shape, b, kv_head * plan.group + g, 0, shape.queries,
              sum + g * plan.head_rows * plan.dim_n, plan.dim_n);
  }
}

template <class Tiles>
void RunTileAttentionForward(const AttentionShape& shape, const AttentionOperand& q,
                             const AttentionOperand& k, const AttentionOperand& v,
                             const AttentionOutput& out, float* lse, std::byte* scratch) {
  const TileAttentionPlan plan = PlanTileAttention(shape, false);
  ForQueryBlocks(plan, [&](std::int64_t b, std::int64_t h, std::int64_t block, int thread) {
    TileForwardTask<Tiles>(plan, b, h, block * kTileQueries, q, k, v, out, lse,
                           scratch + static_cast<std::size_t>(thread) * plan.at.total);
  });
}

template <class Tiles>
void RunTileAttentionBackward(const AttentionShape& shape, const AttentionOperand& q,
                              const AttentionOperand& k, const AttentionOperand& v,
                              const AttentionOperand& out, const AttentionOperand& d_out,
                              const float* lse, const AttentionOutput& dq,
                              const AttentionOutput& dk, const AttentionOutput& dv,
                              std::byte* scratch) {
  const TileAttentionPlan plan = PlanTileAttention(shape, true);
  auto* delta = reinterpret_cast<float*>(scratch);
  const BackwardOperands x{q, k, v, out, d_out, lse, delta, dq, dk, dv};
  const auto buffers = [&](int thread) {
    return scratch + plan.delta + static_cast<std::size_t>(thread) * plan.at.total;
  };
  ForBackwardTasks(
      plan,
      [&](std::int64_t b, std::int64_t h, std::int64_t block, int thread) {
        const std::int64_t q0 = block * kTileQueries;
        auto* rows = reinterpret_cast<float*>(buffers(thread) + plan.at.rows_out);
        SumProducts(HeadOf(out, shape.dtype, b, h), HeadOf(d_out, shape.dtype, b, h), q0,
                    std::min(q0 + kTileQueries, shape.queries), shape.dim, rows, rows + plan.dim_n,
                    delta + (b * shape.heads + h) * shape.queries);
      },
      [&](std::int64_t b, std::int64_t kv_head, int thread) {
        TileHeadTask<Tiles>(plan, x, b, kv_head, buffers(thread));
      },
      [&](std::int64_t b, std::int64_t kv_head, std::int64_t block, int thread) {
        TileKeyTask<Tiles>(plan, x, b, kv_head, block * kTileKeys, buffers(thread));
      },
      [&](std::int64_t b, std::int64_t h, std::int64_t block, int thread) {
        TileQueryTask<Tiles>(plan, x, b, h, block * kTileQueries, buffers(thread));
      });
}

inline std::size_t TileAttentionScratch(const AttentionShape& shape, bool backward) {
  return PlanTileAttention(shape, backward).total;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Score modifications of attention: keys that a query can reach by position, and per row softcap,
// bias, window and segments.
#if defined(LOGITLESS_TENSOR_ATTENTION_SCORES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_TENSOR_ATTENTION_SCORES_INL_H
#undef LOGITLESS_TENSOR_ATTENTION_SCORES_INL_H
#else
#define LOGITLESS_TENSOR_ATTENTION_SCORES_INL_H
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cpu/tensor/vector-inl.h"
#include "kernels/cpu_tensor.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Query t reaches the keys t + first <= s <= t + last.
struct Reach {
  bool bounded = false;   // last bounds the keys
  bool windowed = false;  // first bounds the keys
  std::int64_t first = 0, last = 0;
  // Keys [FirstKey, EndKey) of the queries [begin, end); FirstKey is rounded down to `unit`.
  std::int64_t EndKey(std::int64_t end, std::int64_t keys) const {
    return bounded ? std::clamp<std::int64_t>(end + last, 0, keys) : keys;
  }
  std::int64_t FirstKey(std::int64_t begin, std::int64_t keys, std::int64_t unit) const {
    return windowed ? std::clamp<std::int64_t>(begin + first, 0, keys) / unit * unit : 0;
  }
  // Queries that may see one of the keys [begin, end).
  std::int64_t FirstQuery(std::int64_t begin, std::int64_t queries, std::int64_t unit) const {
    return bounded ? std::clamp<std::int64_t>(begin - last, 0, queries) / unit * unit : 0;
  }
  std::int64_t EndQuery(std::int64_t end, std::int64_t queries) const {
    return windowed ? std::clamp<std::int64_t>(end - first, 0, queries) : queries;
  }
};
inline Reach ReachOf(const AttentionShape& shape) {
  const std::int64_t offset = shape.keys - shape.queries;
  Reach reach;
  reach.windowed = shape.window > 0;
  reach.bounded = shape.causal || reach.windowed;
  // Clamps the window to all positions, which avoids overflow of sums.
  const std::int64_t window = std::min(shape.window, shape.keys + shape.queries);
  reach.last = shape.causal ? offset : offset + window - 1;
  reach.first = offset - window + 1;
  return reach;
}

// Returns true if rows of scores go through FinishScores.
inline bool ChangesScores(const AttentionShape& shape) {
  return shape.softcap != 0.0f || shape.window > 0 || shape.bias || shape.segments;
}

// Identifies the scores of query t of (b, h) and keys from k0 on.
struct ScoreRow {
  std::int64_t b, h, t, k0;
};

template <class T>
HWY_INLINE void MaskSegments(const AttentionSegments& x, const ScoreRow& row, std::int64_t n,
                             float* HWY_RESTRICT s) {
  const T mine = static_cast<const T*>(x.queries)[row.b * x.query_stride + row.t];
  const T* HWY_RESTRICT keys = static_cast<const T*>(x.keys) + row.b * x.key_stride + row.k0;
  for (std::int64_t i = 0; i < n; ++i)
    s[i] = keys[i] == mine ? s[i] : -std::numeric_limits<float>::infinity();
}

HWY_INLINE void AddBias(const AttentionBias& bias, const ScoreRow& row, std::int64_t n,
                        float* HWY_RESTRICT s) {
  const AttentionOperand& x = bias.rows;
  const std::int64_t at = row.b * x.stride_b + row.h * x.stride_h + row.t * x.stride_t + row.k0;
  with_source(bias.dtype, [&]<class Source>() HWY_ATTR {
    const auto* from = static_cast<const typename Source::T*>(x.data) + at;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
    const V factor = hn::Set(D(), kLog2EFloat);
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
      hn::StoreU(hn::MulAdd(Source::Load(D(), from + i), factor, hn::LoadU(D(), s + i)), D(),
                 s + i);
    for (; i < n; ++i) s[i] += Source::One(from[i]) * kLog2EFloat;
  });
}

// Turns dot products s [n] (padded to full vectors) of a query with keys into log2 scores: -inf
// where the query does not see the key. The caller applies the bound `last` of its reach. slope
// [n], if wanted: the derivative of the softcap.
inline void FinishScores(const AttentionShape& shape, const ScoreRow& row, std::int64_t n,
                         float* HWY_RESTRICT s, float* HWY_RESTRICT slope) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (shape.softcap != 0.0f) {
    const V inner = hn::Set(d, shape.scale / shape.softcap);
    const V outer = hn::Set(d, shape.softcap * kLog2EFloat);
    for (std::int64_t i = 0; i < n; i += lanes) {
      const V x = hn::Mul(hn::LoadU(d, s + i), inner);
      const V t = hn::IfThenElse(hn::IsNaN(x), x, Tanh(x));
      hn::StoreU(hn::Mul(t, outer), d, s + i);
      if (slope != nullptr) hn::StoreU(hn::NegMulAdd(t, t, hn::Set(d, 1.0f)), d, slope + i);
    }
  } else {
    const V factor = hn::Set(d, shape.scale * kLog2EFloat);
    for (std::int64_t i = 0; i < n; i += lanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, s + i), factor), d, s + i);
  }
  if (shape.bias) AddBias(*shape.bias, row, n, s);
  const Reach reach = ReachOf(shape);
  if (reach.windowed) {
    const std::int64_t hidden = std::clamp<std::int64_t>(row.t + reach.first - row.k0, 0, n);
    std::fill(s, s + hidden, -std::numeric_limits<float>::infinity());
  }
  if (!shape.segments) return;
  if (shape.segments->dtype == DType::i32) {
    MaskSegments<std::int32_t>(*shape.segments, row, n, s);
  } else {
    MaskSegments<std::int64_t>(*shape.segments, row, n, s);
  }
}

// The same before the gradient of a row: s as above. With a softcap, gradients of the probabilities
// g [n] become (g - delta) slope, and delta 0. slope: scratch.
inline void FinishGradients(const AttentionShape& shape, const ScoreRow& row, std::int64_t n,
                            float* HWY_RESTRICT s, float* HWY_RESTRICT g, float* HWY_RESTRICT slope,
                            float& delta) {
  const D d;
  const bool capped = shape.softcap != 0.0f;
  FinishScores(shape, row, n, s, capped ? slope : nullptr);
  if (!capped) return;
  const V minus = hn::Set(d, delta);
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(hn::Sub(hn::LoadU(d, g + i), minus), hn::LoadU(d, slope + i)), d, g + i);
  delta = 0.0f;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// A chunk of a few tokens takes the time of reading the weights and writing d_weight: its weights
// are multiplied where they are, not packed. The sums have the order, and so the bits, of those of
// packed weights.
#if defined(LOGITLESS_FEW_TOKENS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_FEW_TOKENS_INL_H
#undef LOGITLESS_FEW_TOKENS_INL_H
#else
#define LOGITLESS_FEW_TOKENS_INL_H
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/head/layout.h"
#include "kernels/cpu/head/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

template <class Engine>
bool has_few(const ChunkCommon& chunk) {
  return chunk.tokens <= Engine::kFewTokens;
}

// Weights of a vocabulary tile as an operand of the logits: packed in scratch, or fp32 rows of the
// caller for a few tokens.
template <class Engine>
class WeightTile {
 public:
  using Element = typename Engine::Element;

  WeightTile(const ChunkCommon& chunk, std::int64_t vocab_begin, std::int64_t vocab_count,
             std::int64_t dim_k, Element* scratch)
      : count_(round_up(vocab_count, Engine::kRows)), dim_k_(dim_k), packed_(scratch) {
    const MatrixRows& w = chunk.weight;
    if (has_few<Engine>(chunk) && w.dtype == DType::f32 && w.col_stride == 1 && w.rows == nullptr &&
        count_ == vocab_count) {
      rows_ = static_cast<const float*>(w.data) + vocab_begin * w.row_stride;
      stride_ = w.row_stride;
    } else {
      Engine::PackWeightTile(w, vocab_begin, vocab_count, chunk.shape.dim, dim_k, scratch);
    }
  }

  // Computes z [count][kPanel] of a panel of tokens.
  void logits(const Element* panel, std::int64_t tokens, float* HWY_RESTRICT z) const {
    if constexpr (Engine::kFewTokens > 0) {
      if (rows_ != nullptr)
        return Engine::LogitsOfRows(rows_, stride_, count_, panel, tokens, dim_k_, z);
    }
    Engine::Logits(packed_, count_, panel, tokens, dim_k_, z);
  }

 private:
  std::int64_t count_, dim_k_;
  const Element* packed_;
  const float* rows_ = nullptr;
  std::int64_t stride_ = 0;
};

// to [tokens][ldc] += g [rows][stride]^T . columns [column, + columns) of rows [first, + count) of
// w, in the order of rows.
inline void AddRows(const MatrixRows& w, std::int64_t first, std::int64_t count,
                    std::int64_t column, std::int64_t columns, const float* HWY_RESTRICT g,
                    std::int64_t stride, std::int64_t tokens, float* HWY_RESTRICT to,
                    std::int64_t ldc) {
  constexpr std::int64_t kRows = 4;
  HWY_ALIGN float part[kRows][kColumnBlock];
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const bool in_place = w.dtype == DType::f32 && w.col_stride == 1;
  for (std::int64_t r = 0; r < count; r += kRows) {
    const std::int64_t rows = std::min(kRows, count - r);
    const float* at[kRows] = {part[0], part[1], part[2], part[3]};
    for (std::int64_t i = 0; i < rows; ++i) {
      if (in_place) {
        at[i] = static_cast<const float*>(w.data) + w.row(first + r + i) * w.row_stride + column;
      } else {
        LoadRow(w, first + r + i, column, columns, part[i]);
      }
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* const sums = to + t * ldc;
      const float* const factor = g + r * stride + t;
      std::int64_t j = 0;
      if (rows == kRows) {
        const V f0 = hn::Set(d, factor[0]), f1 = hn::Set(d, factor[stride]),
                f2 = hn::Set(d, factor[2 * stride]), f3 = hn::Set(d, factor[3 * stride]);
        for (; j + lanes <= columns; j += lanes) {
          V sum = hn::LoadU(d, sums + j);
          sum = hn::MulAdd(f0, hn::LoadU(d, at[0] + j), sum);
          sum = hn::MulAdd(f1, hn::LoadU(d, at[1] + j), sum);
          sum = hn::MulAdd(f2, hn::LoadU(d, at[2] + j), sum);
          sum = hn::MulAdd(f3, hn::LoadU(d, at[3] + j), sum);
          hn::StoreU(sum, d, sums + j);
        }
      }
      for (std::int64_t i = 0; i < rows; ++i)
        AddScaled(at[i] + j, columns - j, factor[i * stride], sums + j);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

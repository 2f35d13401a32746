// Accumulation of d_weight in fp32 between chunks, and its single rounding at the end.
#if defined(LOGITLESS_WEIGHT_SINK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_WEIGHT_SINK_INL_H
#undef LOGITLESS_WEIGHT_SINK_INL_H
#else
#define LOGITLESS_WEIGHT_SINK_INL_H
#endif

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/head/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Loads the sums so far of rows [`vocab_begin`, + `vocab_count`) and columns [`column`, +
// `columns`) to c [padded][ldc]; 0 elsewhere.
inline void LoadWeightGradient(const WeightGradientSink& sink, std::int64_t dim,
                               std::int64_t vocab_begin, std::int64_t vocab_count,
                               std::int64_t padded, std::int64_t column, std::int64_t columns,
                               float* HWY_RESTRICT c, std::int64_t ldc) {
  std::memset(c, 0, static_cast<std::size_t>(padded * ldc) * sizeof(float));
  const bool from_output = sink.first_chunk ? sink.accumulate : sink.dtype == DType::f32;
  if (sink.first_chunk && !sink.accumulate) return;
  const MatrixRows output{sink.data, sink.dtype, sink.row_stride, sink.col_stride, nullptr};
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    const std::int64_t vocab_id = sink.row(vocab_begin + r);
    if (from_output) {
      LoadRow(output, vocab_id, column, columns, c + r * ldc);
    } else if (sink.accumulator != nullptr) {
      std::memcpy(c + r * ldc, sink.accumulator + vocab_id * dim + column,
                  static_cast<std::size_t>(columns) * sizeof(float));
    } else {
      const std::uint16_t* high =
          static_cast<const std::uint16_t*>(sink.data) + vocab_id * sink.row_stride;
      const std::uint16_t* low = sink.low + vocab_id * dim;
      for (std::int64_t j = 0; j < columns; ++j) {
        const std::uint32_t bits = static_cast<std::uint32_t>(high[(column + j) * sink.col_stride])
                                       << 16 |
                                   low[column + j];
        c[r * ldc + j] = std::bit_cast<float>(bits);
      }
    }
  }
}

inline void StoreWeightGradient(const WeightGradientSink& sink, std::int64_t dim,
                                std::int64_t vocab_begin, std::int64_t vocab_count,
                                std::int64_t column, std::int64_t columns,
                                const float* HWY_RESTRICT c, std::int64_t ldc) {
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    const std::int64_t vocab_id = sink.row(vocab_begin + r);
    if (sink.last_chunk || sink.dtype == DType::f32) {
      StoreRow(sink.data, sink.dtype, vocab_id * sink.row_stride + column * sink.col_stride,
               sink.col_stride, false, columns, c + r * ldc);
    } else if (sink.accumulator != nullptr) {
      std::memcpy(sink.accumulator + vocab_id * dim + column, c + r * ldc,
                  static_cast<std::size_t>(columns) * sizeof(float));
    } else {
      std::uint16_t* high = static_cast<std::uint16_t*>(sink.data) + vocab_id * sink.row_stride;
      std::uint16_t* low = sink.low + vocab_id * dim;
      for (std::int64_t j = 0; j < columns; ++j) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(c[r * ldc + j]);
        high[(column + j) * sink.col_stride] = static_cast<std::uint16_t>(bits >> 16);
        low[column + j] = static_cast<std::uint16_t>(bits);
      }
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Loads and stores of rows of the caller's matrices, as floats or raw 16-bit patterns.
#if defined(LOGITLESS_SIMD_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_SIMD_ROWS_INL_H
#undef LOGITLESS_SIMD_ROWS_INL_H
#else
#define LOGITLESS_SIMD_ROWS_INL_H
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/element.h"
#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu_head.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// out[0, count) = columns [first, first + count) of one row of `m`, widened.
HWY_INLINE void LoadRow(const MatrixRows& m, std::int64_t row, std::int64_t first,
                        std::int64_t count, float* HWY_RESTRICT out) {
  const std::int64_t base = m.row(row) * m.row_stride + first * m.col_stride;
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (m.col_stride == 1) {
    if (m.dtype == DType::f32) {
      std::memcpy(out, static_cast<const float*>(m.data) + base,
                  static_cast<std::size_t>(count) * 4);
      return;
    }
    const std::uint16_t* from = static_cast<const std::uint16_t*>(m.data) + base;
    if (m.dtype == DType::bf16) {
      for (; i + lanes <= count; i += lanes) hn::StoreU(LoadBf16(from + i), d, out + i);
    } else {
      for (; i + lanes <= count; i += lanes) hn::StoreU(LoadF16(from + i), d, out + i);
    }
  }
  for (; i < count; ++i) {
    out[i] = static_cast<float>(load_element(m.data, m.dtype, base + i * m.col_stride));
  }
}

// The same without widening, for 16-bit rows.
HWY_INLINE void LoadRowBits(const MatrixRows& m, std::int64_t row, std::int64_t first,
                            std::int64_t count, std::uint16_t* HWY_RESTRICT out) {
  const std::uint16_t* from =
      static_cast<const std::uint16_t*>(m.data) + m.row(row) * m.row_stride + first * m.col_stride;
  if (m.col_stride == 1) {
    std::memcpy(out, from, static_cast<std::size_t>(count) * 2);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) out[i] = from[i * m.col_stride];
}

// to[j] += factor * columns [first, first + count) of one row.
HWY_INLINE void AddRow(const MatrixRows& m, std::int64_t row, std::int64_t first,
                       std::int64_t count, float factor, float* HWY_RESTRICT to) {
  constexpr std::int64_t kStep = 256;
  HWY_ALIGN float part[kStep];
  for (std::int64_t at = 0; at < count; at += kStep) {
    const std::int64_t n = std::min(kStep, count - at);
    LoadRow(m, row, first + at, n, part);
    AddScaled(part, n, factor, to + at);
  }
}

// sum_i (a_i - b_i)^2; b null: 0.
HWY_INLINE float SquaredDistance(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                                 std::int64_t count) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const V v =
        b == nullptr ? hn::LoadU(d, a + i) : hn::Sub(hn::LoadU(d, a + i), hn::LoadU(d, b + i));
    sum = hn::MulAdd(v, v, sum);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < count; ++i) {
    const float v = a[i] - (b == nullptr ? 0.0f : b[i]);
    total = __builtin_fmaf(v, v, total);
  }
  return total;
}

// Stores columns of one output row: data[base + i * stride] = values[i] (+ its contents), rounded
// once.
HWY_INLINE void StoreRow(void* data, DType dtype, std::int64_t base, std::int64_t stride,
                         bool accumulate, std::int64_t count, const float* HWY_RESTRICT values) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (stride == 1 && dtype == DType::f32) {
    float* to = static_cast<float*>(data) + base;
    for (; i + lanes <= count; i += lanes) {
      const V v = hn::LoadU(d, values + i);
      hn::StoreU(accumulate ? hn::Add(v, hn::LoadU(d, to + i)) : v, d, to + i);
    }
  } else if (stride == 1 && dtype == DType::bf16) {
    std::uint16_t* to = static_cast<std::uint16_t*>(data) + base;
    for (; i + lanes <= count; i += lanes) {
      const V v = hn::LoadU(d, values + i);
      StoreBf16(accumulate ? hn::Add(v, LoadBf16(to + i)) : v, to + i);
    }
  }
  for (; i < count; ++i) {
    const std::int64_t at = base + i * stride;
    const float old = accumulate ? static_cast<float>(load_element(data, dtype, at)) : 0.0f;
    store_element(data, dtype, at, accumulate ? old + values[i] : values[i]);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

#include "kernels/cuda/tensor/product_form.h"

#include <algorithm>

namespace logitless::cuda {
namespace {

// Returns a matrix [rows, columns] with these strides as column-major, directly or transposed.
ColumnMajor column_major(std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                         std::int64_t col_stride) {
  // A stride along a dimension of size 1 may have any value.
  const auto fits = [](std::int64_t inner, std::int64_t inner_stride, std::int64_t outer,
                       std::int64_t outer_stride) {
    return (inner_stride == 1 || inner == 1) && (outer_stride >= inner || outer == 1);
  };
  if (fits(rows, row_stride, columns, col_stride))
    return {rows, columns, std::max(columns == 1 ? rows : col_stride, rows), false, true};
  if (fits(columns, col_stride, rows, row_stride))
    return {columns, rows, std::max(rows == 1 ? columns : row_stride, columns), true, true};
  return {};
}

LtForm form_of(const GemmShape& s, bool swapped) {
  LtForm f;
  f.swapped = swapped;
  if (!swapped) {
    f.a = column_major(s.m, s.k, s.a.row_stride, s.a.col_stride);
    f.b = column_major(s.k, s.n, s.b.row_stride, s.b.col_stride);
    f.c = column_major(s.m, s.n, s.c.row_stride, s.c.col_stride);
  } else {
    f.a = column_major(s.n, s.k, s.b.col_stride, s.b.row_stride);
    f.b = column_major(s.k, s.m, s.a.col_stride, s.a.row_stride);
    f.c = column_major(s.n, s.m, s.c.col_stride, s.c.row_stride);
  }
  return f;
}

}  // namespace

LtForm form_of(const GemmShape& s) {
  const LtForm rows = form_of(s, true);  // row-major c is the usual case
  return rows.possible() ? rows : form_of(s, false);
}

bool suits_lt(const GemmShape& s) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  const DType in = s.a.dtype, out = s.c.dtype;
  const bool types = in == DType::f64   ? out == DType::f64
                     : in == DType::f32 ? out == DType::f32
                                        : out == in || out == DType::f32;
  const auto aligned = [&](const MatrixLayout& m) {
    return m.alignment % static_cast<std::int64_t>(size_of(m.dtype)) == 0;
  };
  const auto apart = s.batch == 1 || s.c.batch_stride != 0;
  // It rounds the GEMM before it adds it to a 16-bit c.
  const bool once = !s.accumulate || size_of(out) >= 4;
  return types && apart && once && aligned(s.a) && aligned(s.b) && aligned(s.c) && s.k > 0 &&
         s.m < kMost && s.n < kMost && s.k < kMost && s.batch < kMost && form_of(s).possible();
}

bool suits_lt_epilogue(const GemmShape& s) {
  const GemmEpilogue& e = s.epilogue;
  // Rows of a row-major c are cuBLASLt's columns, along which the bias runs.
  if (s.batch != 1 || s.accumulate || !suits_lt(s) || !form_of(s).swapped ||
      s.c.dtype != s.a.dtype || size_of(s.c.dtype) != 2)
    return false;
  const auto by_rows = [&](const MatrixLayout& m) {
    return m.dtype == s.c.dtype && m.col_stride == 1 && m.row_stride >= s.n &&
           m.row_stride % 8 == 0 && m.alignment % 16 == 0;
  };
  return e.bias_alignment % 16 == 0 && (!e.residual || by_rows(e.residual_layout)) &&
         (!e.has_aux() || by_rows(e.aux_layout));
}

std::vector<LtAlgorithm> preferred_algorithms(const GemmShape& s) {
  constexpr int kHopper = 66, kHopperGradient = 39;          // with gelu_gradient another id
  constexpr int k128x128 = 20, k96x128 = 28, k128x160 = 29;  // tiles
  constexpr int k2x1 = 3, k1x2 = 5;                          // clusters
  constexpr std::int64_t kShort = 2048;
  const GemmEpilogue& e = s.epilogue;
  // Writing 16-bit results of a short mainloop costs as much as multiplying. Smaller tiles
  // overlap their epilogues with other tiles' mainloops.
  if (size_of(s.c.dtype) != 2) return {};
  if (e.gelu) return {{kHopper, k96x128, k2x1}, {kHopper, k96x128, k1x2}};
  if (e.gelu_gradient) return {{kHopperGradient, k128x128, k1x2}};
  if (s.k > 2 * s.n) return {};
  if (e.any()) return {{kHopper, k128x128, k2x1}};
  if (s.k > kShort) return {};
  return {{kHopper, k128x160, k2x1}, {kHopper, k128x128, k2x1}};
}

std::size_t lt_workspace_bytes(const GemmShape& shape) {
  // Split-K keeps its partial results there, each as large as c in the accumulator type. Parts with
  // a shorter k do not pay.
  constexpr std::int64_t kShortest = 512, kMostParts = 16, kCounters = 256 << 10;
  if (!suits_lt(shape)) return 0;
  const std::int64_t parts = std::clamp<std::int64_t>(shape.k / kShortest, 1, kMostParts);
  const auto wide = std::max<std::int64_t>(4, static_cast<std::int64_t>(size_of(shape.c.dtype)));
  const double bytes = 1.0 * wide * static_cast<double>(shape.m) * static_cast<double>(shape.n) *
                           static_cast<double>(shape.batch * parts) +
                       kCounters;
  if (bytes >= static_cast<double>(kLtWorkspaceBytes)) return kLtWorkspaceBytes;
  return (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
}

}  // namespace logitless::cuda

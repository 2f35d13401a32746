#include "matrix.h"

#include <algorithm>

#include "logitless/parallel.h"

// Compiles one source for AVX2 as well, and the loader picks. Elsewhere there is only the
// compiler's target.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__AVX2__)
#define LOG_BILINEAR_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define LOG_BILINEAR_CLONES
#endif

namespace log_bilinear {
namespace {

// A register tile of the result: 6 x 16 floats are 12 of 16 AVX registers.
constexpr std::int64_t kRows = 6;
constexpr std::int64_t kColumns = 16;

typedef float Lane __attribute__((vector_size(32), aligned(4), may_alias));

// Computes out[r * out_row + c] = sum over k of left(r, k) * right[k * right_row + c] for a whole
// tile.
LOG_BILINEAR_CLONES void multiply_tile(std::int64_t inner, const float* left, std::int64_t left_row,
                                       std::int64_t left_column, const float* right,
                                       std::int64_t right_row, float* out, std::int64_t out_row) {
  Lane sum[kRows][2] = {};
  for (std::int64_t k = 0; k < inner; ++k) {
    const Lane* b = reinterpret_cast<const Lane*>(right + k * right_row);
    const Lane b0 = b[0];
    const Lane b1 = b[1];
    const float* a = left + k * left_column;
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] += a[r * left_row] * b0;
      sum[r][1] += a[r * left_row] * b1;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    Lane* to = reinterpret_cast<Lane*>(out + r * out_row);
    to[0] = sum[r][0];
    to[1] = sum[r][1];
  }
}

// The same for the partial tiles at the right and lower edges.
void multiply_edge(std::int64_t rows, std::int64_t columns, std::int64_t inner, const float* left,
                   std::int64_t left_row, std::int64_t left_column, const float* right,
                   std::int64_t right_row, float* out, std::int64_t out_row) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float sum[kColumns] = {};
    for (std::int64_t k = 0; k < inner; ++k) {
      const float a = left[r * left_row + k * left_column];
      for (std::int64_t c = 0; c < columns; ++c) sum[c] += a * right[k * right_row + c];
    }
    std::copy(sum, sum + columns, out + r * out_row);
  }
}

}  // namespace

void multiply(int threads, std::int64_t rows, std::int64_t columns, std::int64_t inner,
              const LeftFactor& left, const float* right, float* out) {
  // Column panels are the outer loop: the panel of `right`, inner x 16 floats, stays in the cache
  // for all row tiles.
  const std::int64_t row_tiles = (rows + kRows - 1) / kRows;
  const std::int64_t column_tiles = (columns + kColumns - 1) / kColumns;
  logitless::parallel_for(threads, column_tiles * row_tiles, [&](std::int64_t task, int) {
    const std::int64_t r = task % row_tiles * kRows;
    const std::int64_t c = task / row_tiles * kColumns;
    const std::int64_t tile_rows = std::min(kRows, rows - r);
    const std::int64_t tile_columns = std::min(kColumns, columns - c);
    const float* a = left.data + r * left.row;
    if (tile_rows == kRows && tile_columns == kColumns) {
      multiply_tile(inner, a, left.row, left.column, right + c, columns, out + r * columns + c,
                    columns);
    } else {
      multiply_edge(tile_rows, tile_columns, inner, a, left.row, left.column, right + c, columns,
                    out + r * columns + c, columns);
    }
  });
}

void transpose(int threads, std::int64_t rows, std::int64_t columns, const float* in, float* out) {
  constexpr std::int64_t kBlock = 32;
  logitless::parallel_ranges(threads, rows, kBlock, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::int64_t r = first; r < last; ++r) out[c * rows + r] = in[r * columns + c];
    }
  });
}

}  // namespace log_bilinear

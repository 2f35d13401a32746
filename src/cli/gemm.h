// A plain blocked GEMM in f32, for the unfused baseline of `logitless bench`.
#pragma once

#include <cstdint>

namespace logitless::cli {

// A matrix in memory; element (i, j) is data[i * row_stride + j * col_stride].
struct Matrix {
  const float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

inline Matrix row_major(const float* data, std::int64_t rows, std::int64_t cols) {
  return {data, rows, cols, cols, 1};
}
inline Matrix transposed(Matrix m) { return {m.data, m.cols, m.rows, m.col_stride, m.row_stride}; }

// Computes c = a b; c is [a.rows, b.cols], row-major. Blocks are packed for the caches; the SIMD
// width is the processor's.
void gemm(Matrix a, Matrix b, float* c, int threads);

}  // namespace logitless::cli

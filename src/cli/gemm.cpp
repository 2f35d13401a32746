#include <algorithm>
#include <cstring>

#include "cli/unfused.h"
#include "logitless/memory.h"
#include "logitless/parallel.h"

namespace logitless::cli {
namespace {

// A packed block of a, rows x depth, takes 192 KiB, for L2. One of b, depth x columns, takes 1.5
// MiB, for L3.
constexpr std::int64_t kBlockRows = 192;
constexpr std::int64_t kBlockDepth = 256;
constexpr std::int64_t kBlockCols = 1536;
// The tile of the micro-kernel: kTileRows x (two vectors), all in registers.
constexpr int kTileRows = 6;
constexpr int kMostTileCols = 32;

// Multiplies a [kTileRows x depth] and b [depth x 2 vectors], packed depth-first. Adds the product
// to c, or stores it if `first`.
using MicroKernel = void (*)(const float* a, const float* b, std::int64_t depth, float* c,
                             std::int64_t c_stride, bool first);

template <int kBytes>
[[gnu::always_inline]] inline void micro_body(const float* a, const float* b, std::int64_t depth,
                                              float* c, std::int64_t c_stride, bool first) {
  typedef float Vector __attribute__((vector_size(kBytes), aligned(4), may_alias));
  constexpr int kLanes = kBytes / 4;
  Vector sum[kTileRows][2] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    const Vector b0 = *reinterpret_cast<const Vector*>(b + k * 2 * kLanes);
    const Vector b1 = *reinterpret_cast<const Vector*>(b + k * 2 * kLanes + kLanes);
    for (int i = 0; i < kTileRows; ++i) {
      sum[i][0] += a[k * kTileRows + i] * b0;
      sum[i][1] += a[k * kTileRows + i] * b1;
    }
  }
  for (int i = 0; i < kTileRows; ++i) {
    for (int v = 0; v < 2; ++v) {
      Vector* out = reinterpret_cast<Vector*>(c + i * c_stride + v * kLanes);
      *out = first ? sum[i][v] : *out + sum[i][v];
    }
  }
}

void micro_plain(const float* a, const float* b, std::int64_t depth, float* c,
                 std::int64_t c_stride, bool first) {
  micro_body<16>(a, b, depth, c, c_stride, first);
}

struct Micro {
  MicroKernel run;
  int cols;
};

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void micro_avx2(const float* a, const float* b, std::int64_t depth,
                                            float* c, std::int64_t c_stride, bool first) {
  micro_body<32>(a, b, depth, c, c_stride, first);
}
[[gnu::target("avx512f,fma")]] void micro_avx512(const float* a, const float* b, std::int64_t depth,
                                                 float* c, std::int64_t c_stride, bool first) {
  micro_body<64>(a, b, depth, c, c_stride, first);
}
Micro choose_micro() {
  if (__builtin_cpu_supports("avx512f")) return {micro_avx512, 32};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {micro_avx2, 16};
  return {micro_plain, 8};
}
#else
Micro choose_micro() { return {micro_plain, 8}; }
#endif

// Packs panels of `width` rows of m, depth-first, out[panel][k][i]; rows past the end are 0. Takes
// rows [row, row + rows) and columns [col, col + depth).
void pack(const Matrix& m, std::int64_t row, std::int64_t rows, std::int64_t col,
          std::int64_t depth, int width, float* out) {
  for (std::int64_t begin = 0; begin < rows; begin += width, out += width * depth) {
    const std::int64_t count = std::min<std::int64_t>(width, rows - begin);
    const float* from = m.data + (row + begin) * m.row_stride + col * m.col_stride;
    if (count < width) std::memset(out, 0, static_cast<std::size_t>(width * depth) * sizeof(float));
    if (m.row_stride == 1) {
      for (std::int64_t k = 0; k < depth; ++k) {
        for (std::int64_t i = 0; i < count; ++i) out[k * width + i] = from[i + k * m.col_stride];
      }
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        for (std::int64_t k = 0; k < depth; ++k)
          out[k * width + i] = from[i * m.row_stride + k * m.col_stride];
      }
    }
  }
}

// Computes one block of c, [rows x cols] at (row, col), over the whole depth.
void block(const Matrix& a, const Matrix& b_transposed, float* c, std::int64_t c_stride,
           std::int64_t row, std::int64_t col, const Micro& micro, float* packed_a,
           float* packed_b) {
  const std::int64_t rows = std::min(kBlockRows, a.rows - row);
  const std::int64_t cols = std::min(kBlockCols, b_transposed.rows - col);
  for (std::int64_t k = 0; k < a.cols; k += kBlockDepth) {
    const std::int64_t depth = std::min(kBlockDepth, a.cols - k);
    pack(a, row, rows, k, depth, kTileRows, packed_a);
    pack(b_transposed, col, cols, k, depth, micro.cols, packed_b);
    for (std::int64_t j = 0; j < cols; j += micro.cols) {
      for (std::int64_t i = 0; i < rows; i += kTileRows) {
        const float* pa = packed_a + i * depth;
        const float* pb = packed_b + j * depth;
        float* to = c + (row + i) * c_stride + col + j;
        if (i + kTileRows <= rows && j + micro.cols <= cols) {
          micro.run(pa, pb, depth, to, c_stride, k == 0);
          continue;
        }
        float edge[kTileRows * kMostTileCols];
        micro.run(pa, pb, depth, edge, micro.cols, true);
        for (std::int64_t r = 0; r < std::min<std::int64_t>(kTileRows, rows - i); ++r) {
          for (std::int64_t s = 0; s < std::min<std::int64_t>(micro.cols, cols - j); ++s) {
            float& element = to[r * c_stride + s];
            element = (k == 0 ? 0.0f : element) + edge[r * micro.cols + s];
          }
        }
      }
    }
  }
}

}  // namespace

void gemm(Matrix a, Matrix b, float* c, int threads) {
  const Micro micro = choose_micro();
  const Matrix b_transposed = transposed(b);
  const std::int64_t row_blocks = (a.rows + kBlockRows - 1) / kBlockRows;
  const std::int64_t col_blocks = (b.cols + kBlockCols - 1) / kBlockCols;
  constexpr std::int64_t kFloats =
      (kBlockRows + kTileRows + kBlockCols + kMostTileCols) * kBlockDepth;
  const Buffer packed(static_cast<std::size_t>(kFloats * threads) * sizeof(float));
  parallel_for(threads, row_blocks * col_blocks, [&](std::int64_t task, int thread) {
    float* packed_a = packed.as<float>() + kFloats * thread;
    block(a, b_transposed, c, b.cols, task % row_blocks * kBlockRows,
          task / row_blocks * kBlockCols, micro, packed_a,
          packed_a + (kBlockRows + kTileRows) * kBlockDepth);
  });
}

}  // namespace logitless::cli

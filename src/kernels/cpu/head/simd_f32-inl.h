// Engine "f32": operands widened to fp32, GEMMs by fused multiply-add. Any dtype, any target.
//
// Packed layouts: a B panel is [k][kPanel] floats; the panels of an operand are adjacent. A
// operands are read in place with strides (rs between rows, cs along k). So the gradient of the
// vocabulary block [vocab][tokens] serves both GEMMs.
#if defined(LOGITLESS_SIMD_F32_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_SIMD_F32_INL_H
#undef LOGITLESS_SIMD_F32_INL_H
#else
#define LOGITLESS_SIMD_F32_INL_H
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/checked_ranges.h"
#include "kernels/cpu/head/layout.h"
#include "kernels/cpu/head/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

struct EngineF32 {
  using Element = float;
  using Bf16 = PortableBf16;
  struct Session {};  // nothing to set up in a thread
  // Register blocking: kRows x kVectors accumulators, one row of B, one broadcast. 16 registers on
  // AVX2, 32 on AVX-512 and NEON, whose vectors are short.
  static constexpr int kLanes = static_cast<int>(kMaxLanes);
  static constexpr int kRows = HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3 ? 8 : 4;
  static constexpr int kVectors = kLanes == 1 ? 4 : HWY_ARCH_ARM ? 6 : 3;
  static constexpr int kPanel = kVectors * kLanes;
  static_assert(kPanel % kRows == 0, "blocks of whole panels are blocks of whole micro-tiles");
  // Cache blocking: k of an L1-resident slice of a B panel.
  static constexpr std::int64_t kDepth = 256;
  static constexpr std::int64_t kTileGroup = 1;
  static constexpr std::int64_t kTokenBlock = 128;
  static constexpr std::int64_t kFewTokens = 4;
  static constexpr EngineTraits kTraits{4, kPanel, 1, false, kTileGroup};

  // Packs rows of tokens, contracted along columns: panel[k][t].
  static void PackTokens(const MatrixRows& x, std::int64_t first, std::int64_t tokens,
                         std::int64_t dim, std::int64_t, Element* HWY_RESTRICT panel) {
    constexpr std::int64_t kStep = 256;
    float part[kStep];
    for (std::int64_t t = 0; t < kPanel; ++t) {
      for (std::int64_t at = 0; at < dim; at += kStep) {
        const std::int64_t n = std::min(kStep, dim - at);
        if (t < tokens) {
          LoadRow(x, first + t, at, n, part);
        } else {
          std::memset(part, 0, sizeof(part));
        }
        for (std::int64_t k = 0; k < n; ++k) panel[(at + k) * kPanel + t] = part[k];
      }
    }
  }

  // Packs rows [first, first + count) as k = [at, at + padded) of every panel of `out` (panels of
  // `depth` rows). Rows past count and columns past dim are 0.
  static void PackRows(const MatrixRows& m, std::int64_t first, std::int64_t count,
                       std::int64_t padded, std::int64_t dim, std::int64_t at, std::int64_t depth,
                       Element* HWY_RESTRICT out) {
    const std::int64_t panels = ceil_div(dim, kPanel);
    for (std::int64_t k = 0; k < padded; ++k) {
      for (std::int64_t q = 0; q < panels; ++q) {
        float* to = out + (q * depth + at + k) * kPanel;
        const std::int64_t n = k < count ? std::min<std::int64_t>(kPanel, dim - q * kPanel) : 0;
        if (n > 0) LoadRow(m, first + k, q * kPanel, n, to);
        for (std::int64_t j = n; j < kPanel; ++j) to[j] = 0.0f;
      }
    }
  }

  // Packs vocabulary rows as the A operand of the logits: [kVocabTile][stride].
  static void PackWeightTile(const MatrixRows& w, std::int64_t first, std::int64_t count,
                             std::int64_t dim, std::int64_t dim_k, Element* HWY_RESTRICT tile) {
    for (std::int64_t r = 0; r < round_up(count, kRows); ++r) {
      if (r < count) {
        LoadRow(w, first + r, 0, dim, tile + r * (dim_k + 16));
      } else {
        std::memset(tile + r * (dim_k + 16), 0, static_cast<std::size_t>(dim) * 4);
      }
    }
  }

  // Packs values [kVocabTile][kPanel] as k = [k, k + kVocabTile) of a panel of tokens; k past dim_k
  // are dropped.
  static void EmitTokens(const float* HWY_RESTRICT values, std::int64_t k, std::int64_t dim_k,
                         Element* HWY_RESTRICT panel) {
    std::memcpy(panel + k * kPanel, values,
                static_cast<std::size_t>(std::min(kVocabTile, dim_k - k) * kPanel) * sizeof(float));
  }

  // z [rows][kPanel] = tile . panel, rows rounded up to kRows.
  static void Logits(const Element* tile, std::int64_t rows, const Element* panel,
                     std::int64_t tokens, std::int64_t dim_k, float* HWY_RESTRICT z) {
    LogitsOfRows(tile, dim_k + 16, rows, panel, tokens, dim_k, z);
  }

  // The same of rows that are `stride` elements apart.
  static void LogitsOfRows(const float* first, std::int64_t stride, std::int64_t rows,
                           const Element* panel, std::int64_t tokens, std::int64_t dim_k,
                           float* HWY_RESTRICT z) {
    const int vectors = static_cast<int>(ceil_div(tokens, kLanes));
    // Lanes without a token must hold finite numbers: their exponentials are multiplied by 0.
    if (vectors < kVectors)
      std::memset(z, 0, static_cast<std::size_t>(rows * kPanel) * sizeof(float));
    for (std::int64_t k = 0; k < dim_k; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, dim_k - k);
      std::int64_t r = 0;
      // One vector of tokens has registers for twice the rows, whose additions do not wait.
      for (; vectors == 1 && r + 2 * kRows <= rows; r += 2 * kRows) {
        Tile<1, 2 * kRows>(first + r * stride + k, stride, 1, panel + k * kPanel, depth,
                           z + r * kPanel, kPanel, k > 0);
      }
      for (; r < rows; r += kRows) {
        Micro(vectors, first + r * stride + k, stride, 1, panel + k * kPanel, depth, z + r * kPanel,
              kPanel, k > 0);
      }
    }
  }

  // Destination of a vocabulary tile's gradient: row j is at `slab + j * stride`.
  struct Gradient {
    Element* vocab_block;  // rows of this tile
    std::int64_t stride;   // between them
  };
  static Gradient TileGradient(Element* vocab_block, std::int64_t tile, Element*,
                               const Layout& layout) {
    return {vocab_block + tile * kVocabTile * layout.gradient_stride, layout.gradient_stride};
  }
  static void EmitGradient(const Gradient& to, std::int64_t panel, std::int64_t, std::int64_t,
                           const float* HWY_RESTRICT g) {
    for (std::int64_t r = 0; r < kVocabTile; ++r) {
      std::memcpy(to.vocab_block + r * to.stride + panel * kPanel, g + r * kPanel,
                  kPanel * sizeof(float));
    }
  }

  // c [kVocabTile][ldc] += gradient tile [vocab][tokens] . x panels [first_panel, + panels).
  static void WeightGradient(const Gradient& g, std::int64_t rows, const Element* x,
                             std::int64_t tokens, std::int64_t depth, std::int64_t first_panel,
                             std::int64_t panels, float* HWY_RESTRICT c, std::int64_t ldc) {
    Multiply(g.vocab_block, g.stride, 1, round_up(rows, kRows), x + first_panel * depth * kPanel,
             depth, panels, tokens, c, ldc);
  }

  // Destination of a single tile and block of tokens: [kVocabTile][block tokens] at `pair`.
  static Gradient PairGradient(Element* pair, std::int64_t block_tokens, Element*, std::int64_t,
                               const Layout&) {
    return {pair, block_tokens};
  }

  // c [tokens][ldc] += gradient of the vocabulary block [entries][tokens of this block]^T . w
  // panels.
  static void HiddenGradient(const Element* vocab_block, std::int64_t stride,
                             std::int64_t first_token, std::int64_t tokens, std::int64_t,
                             const Element* w, std::int64_t vocab_count, std::int64_t depth,
                             std::int64_t first_panel, std::int64_t panels, float* HWY_RESTRICT c,
                             std::int64_t ldc) {
    Multiply(vocab_block + first_token, 1, stride, tokens, w + first_panel * depth * kPanel, depth,
             panels, vocab_count, c, ldc);
  }

 private:
  static void Multiply(const float* a, std::int64_t rs, std::int64_t cs, std::int64_t rows,
                       const float* b, std::int64_t panel_depth, std::int64_t panels,
                       std::int64_t depth, float* HWY_RESTRICT c, std::int64_t ldc) {
    for (std::int64_t k = 0; k < depth; k += kDepth) {
      const std::int64_t n = std::min(kDepth, depth - k);
      for (std::int64_t q = 0; q < panels; ++q) {
        for (std::int64_t r = 0; r < rows; r += kRows) {
          Tile<kVectors>(a + r * rs + k * cs, rs, cs, b + (q * panel_depth + k) * kPanel, n,
                         c + r * ldc + q * kPanel, ldc, true);
        }
      }
    }
  }

  static HWY_INLINE void Micro(int vectors, const float* a, std::int64_t rs, std::int64_t cs,
                               const float* b, std::int64_t depth, float* HWY_RESTRICT c,
                               std::int64_t ldc, bool add) {
    if (vectors == 1) return Tile<1>(a, rs, cs, b, depth, c, ldc, add);
    if (vectors == 2) return Tile<2>(a, rs, cs, b, depth, c, ldc, add);
    return Tile<kVectors>(a, rs, cs, b, depth, c, ldc, add);
  }

  // c [Rows][N vectors] (+)= a . b; sums run along k in order.
  template <int N, int Rows = kRows>
  LOGITLESS_CHECKED_BY_RANGES static HWY_NOINLINE void Tile(
      const float* a, std::int64_t rs, std::int64_t cs, const float* HWY_RESTRICT b,
      std::int64_t depth, float* HWY_RESTRICT c, std::int64_t ldc, bool add) {
    if constexpr (kChecksRanges) {
      if (cs == 1) {
        check_floats(a, Rows, rs, depth);
      } else {  // rs is 1
        check_floats(a, depth, cs, Rows);
      }
      check_floats(b, 1, 0, (depth - 1) * kPanel + N * kLanes);
      check_floats(c, Rows, ldc, N * kLanes);
    }
    const D d;
    V acc[Rows][N];
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j)
        acc[i][j] = add ? hn::LoadU(d, c + i * ldc + j * kLanes) : hn::Zero(d);
    }
    for (std::int64_t k = 0; k < depth; ++k) {
      V row[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) row[j] = hn::LoadU(d, b + k * kPanel + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const V x = hn::Set(d, a[i * rs + k * cs]);
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) acc[i][j] = hn::MulAdd(x, row[j], acc[i][j]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) hn::StoreU(acc[i][j], d, c + i * ldc + j * kLanes);
    }
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Engine of "amx_bf16", "avx512_bf16" and "amx_bf16_emulated": bf16 operands packed as AMX tiles,
// fp32 sums. `Tiles` (bf16_tiles-inl.h) is the micro-kernel.
//
// Every packed operand is a sequence of k steps (32 values of the contracted dimension). A step has
// the two tiles of 32 rows or columns:
//   tokens of the logits       [panel][dim / 32][2 tiles];
//   weights of the logits      [4 blocks of 32 entries][dim / 32][2 tiles];
//   gradient for d_weight      [panel = k step][kTileGroup x 8 tiles of 16 entries];
//   gradient for d_hidden      [panel][vocabulary block / 32][2 tiles of 16 tokens];
//   hidden, weights as B rows  [panel of 32 columns][k / 32][2 tiles]
#if defined(LOGITLESS_BF16_ENGINE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_BF16_ENGINE_INL_H
#undef LOGITLESS_BF16_ENGINE_INL_H
#else
#define LOGITLESS_BF16_ENGINE_INL_H
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/bf16_tiles-inl.h"
#include "kernels/cpu/head/layout.h"
#include "kernels/cpu/head/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

template <class Tiles>
struct EngineBf16 {
  using Element = std::uint16_t;
  using Session = typename Tiles::Session;
  using Bf16 = typename Tiles::Bf16;
  static constexpr int kRows = 32;
  static constexpr int kPanel = 32;
  static constexpr std::int64_t kStep = 2 * kTile;  // elements of a k step of one operand
  // Cache blocking: k steps of an L1-resident slice. The forward takes 16 KiB of each operand,
  // since the logits stay in L1 too. The gradients take twice that, since their sums come from L2.
  static constexpr std::int64_t kDepth = 8;
  static constexpr std::int64_t kGradientDepth = 16;
  // Vocabulary tiles whose d_weight is computed together: the packed hidden states, which come from
  // the last-level cache, are read once for all of them.
  static constexpr std::int64_t kTileGroup = 2;
  static constexpr std::int64_t kTokenBlock = 256;
  static constexpr std::int64_t kFewTokens = 0;  // its products are of bf16 alone
  static constexpr EngineTraits kTraits{2, kPanel, 32, true, kTileGroup};

  static void PackTokens(const MatrixRows& x, std::int64_t first, std::int64_t tokens,
                         std::int64_t dim, std::int64_t dim_k, Element* HWY_RESTRICT panel) {
    alignas(64) std::uint32_t words[32 * 16];  // [token][pair of k]
    for (std::int64_t k = 0; k < dim_k; k += 32) {
      const std::int64_t n = std::min<std::int64_t>(32, dim - k);
      std::memset(words, 0, sizeof(words));
      for (std::int64_t t = 0; t < tokens; ++t) {
        LoadRowBits(x, first + t, k, n, reinterpret_cast<std::uint16_t*>(words + t * 16));
      }
      auto* to = reinterpret_cast<std::uint32_t*>(panel + k / 32 * kStep);
      TransposeWords(words, 16, to, 16);
      TransposeWords(words + 16 * 16, 16, to + kTile / 2, 16);
    }
  }

  // Packs values [kVocabTile][kPanel] as k = [k, k + kVocabTile) of a panel of tokens; k past dim_k
  // are dropped.
  static void EmitTokens(const float* HWY_RESTRICT values, std::int64_t k, std::int64_t dim_k,
                         Element* HWY_RESTRICT panel) {
    const D d;
    const DU du;
    const std::int64_t lanes = std::min<std::int64_t>(static_cast<std::int64_t>(hn::Lanes(d)), 16);
    for (std::int64_t at = 0; at < std::min(kVocabTile, dim_k - k); at += 2) {
      const float* even = values + at * kPanel;
      auto* to = reinterpret_cast<std::uint32_t*>(panel + (k + at) / 32 * kStep) + at % 32 / 2 * 16;
      for (std::int64_t t = 0; t < kPanel; t += lanes) {
        hn::StoreU(Bf16::Pair(hn::LoadU(d, even + t), hn::LoadU(d, even + kPanel + t)), du,
                   to + t / 16 * (kTile / 2) + t % 16);
      }
    }
  }

  static void PackRows(const MatrixRows& m, std::int64_t first, std::int64_t count,
                       std::int64_t padded, std::int64_t dim, std::int64_t at, std::int64_t depth,
                       Element* HWY_RESTRICT out) {
    const DU du;
    const DU16 du16;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(du));
    const std::int64_t panels = ceil_div(dim, kPanel);
    alignas(64) std::uint16_t even[32];
    alignas(64) std::uint16_t odd[32];
    for (std::int64_t k = 0; k < padded; k += 2) {
      for (std::int64_t q = 0; q < panels; ++q) {
        const std::int64_t n = std::min<std::int64_t>(kPanel, dim - q * kPanel);
        LoadPadded(m, first, k, count, q * kPanel, n, even);
        LoadPadded(m, first, k + 1, count, q * kPanel, n, odd);
        auto* to = reinterpret_cast<std::uint32_t*>(out + (q * depth + at + k / 32 * 32) * kPanel) +
                   k % 32 / 2 * 16;
        for (std::int64_t j = 0; j < kPanel; j += lanes) {
          const auto low = hn::PromoteTo(du, hn::LoadU(du16, even + j));
          const auto high = hn::PromoteTo(du, hn::LoadU(du16, odd + j));
          hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), du, to + j / 16 * (kTile / 2) + j % 16);
        }
      }
    }
  }

  static void PackWeightTile(const MatrixRows& w, std::int64_t first, std::int64_t count,
                             std::int64_t dim, std::int64_t dim_k, Element* HWY_RESTRICT tile) {
    for (std::int64_t r = 0; r < round_up(count, kRows); ++r) {
      Element* to = tile + r / 32 * (dim_k / 32 * kStep) + r % 32 / 16 * kTile + r % 16 * 32;
      for (std::int64_t k = 0; k < dim_k; k += 32) {
        const std::int64_t n = r < count ? std::min<std::int64_t>(32, dim - k) : 0;
        Element* at = to + k / 32 * kStep;
        if (n > 0) LoadRowBits(w, first + r, k, n, at);
        if (n < 32)
          std::memset(at + std::max<std::int64_t>(n, 0), 0, static_cast<std::size_t>(32 - n) * 2);
      }
    }
  }

  static void Logits(const Element* tile, std::int64_t rows, const Element* panel, std::int64_t,
                     std::int64_t dim_k, float* HWY_RESTRICT z) {
    const std::int64_t steps = dim_k / 32;
    for (std::int64_t s = 0; s < steps; s += kDepth) {
      const std::int64_t n = std::min(kDepth, steps - s);
      for (std::int64_t r = 0; r < rows; r += kRows) {
        Tiles::Multiply(tile + (r / 32 * steps + s) * kStep, kStep, panel + s * kStep, kStep, n,
                        z + r * kPanel, kPanel, s > 0);
      }
    }
  }

  struct Gradient {
    Element* vocab_block;      // null when d_hidden is not wanted
    Element* tile;             // null when d_weight is not wanted
    std::int64_t block_steps;  // k steps of the vocabulary block
  };
  static Gradient TileGradient(Element* vocab_block, std::int64_t, Element* tile,
                               const Layout& layout) {
    return {layout.d_hidden_wanted ? vocab_block : nullptr, layout.d_weight_wanted ? tile : nullptr,
            layout.block_vocab / 32};
  }
  // Destination of a single tile and block of tokens. `pair` is a vocabulary block of one tile;
  // `tile` is the thread's gradient tile, used from the block's first panel on.
  static Gradient PairGradient(Element* pair, std::int64_t, Element* tile, std::int64_t first_panel,
                               const Layout& layout) {
    return {layout.d_hidden_wanted ? pair : nullptr,
            layout.d_weight_wanted ? tile + first_panel * kTileGroup * (kVocabTile / 16) * kTile
                                   : nullptr,
            kVocabTile / 32};
  }
  static void EmitGradient(const Gradient& to, std::int64_t panel, std::int64_t block_tile,
                           std::int64_t slot, const float* HWY_RESTRICT g) {
    const D d;
    const DU du;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
    if (to.tile != nullptr) {
      Element* at = to.tile + (panel * kTileGroup + slot) * (kVocabTile / 16) * kTile;
      for (std::int64_t i = 0; i < kVocabTile * kPanel; i += lanes)
        Bf16::Store(hn::Load(d, g + i), at + i);
    }
    if (to.vocab_block == nullptr) return;
    alignas(64) std::uint32_t words[16 * 32];  // [pair of vocabulary entries][token]
    for (std::int64_t k = 0; k < kVocabTile; k += 32) {
      for (std::int64_t i = 0; i < 16; ++i) {
        const float* even = g + (k + 2 * i) * kPanel;
        for (std::int64_t t = 0; t < kPanel; t += lanes) {
          hn::Store(Bf16::Pair(hn::Load(d, even + t), hn::Load(d, even + kPanel + t)), du,
                    words + i * 32 + t);
        }
      }
      Element* at =
          to.vocab_block + (panel * to.block_steps + (block_tile * kVocabTile + k) / 32) * kStep;
      TransposeWords(words, 32, reinterpret_cast<std::uint32_t*>(at), 16);
      TransposeWords(words + 16, 32, reinterpret_cast<std::uint32_t*>(at + kTile), 16);
    }
  }

  static void WeightGradient(const Gradient& g, std::int64_t rows, const Element* x,
                             std::int64_t tokens, std::int64_t depth, std::int64_t first_panel,
                             std::int64_t panels, float* HWY_RESTRICT c, std::int64_t ldc) {
    const std::int64_t steps = ceil_div(tokens, std::int64_t{32});
    constexpr std::int64_t kStepA = kTileGroup * (kVocabTile / 16) * kTile;
    for (std::int64_t s = 0; s < steps; s += kGradientDepth) {
      const std::int64_t n = std::min(kGradientDepth, steps - s);
      for (std::int64_t q = 0; q < panels; ++q) {
        const Element* b = x + (first_panel + q) * depth * kPanel + s * kStep;
        for (std::int64_t r = 0; r < rows; r += kRows) {
          Tiles::Multiply(g.tile + s * kStepA + r / 16 * kTile, kStepA, b, kStep, n,
                          c + r * ldc + q * kPanel, ldc, true);
        }
      }
    }
  }

  static void HiddenGradient(const Element* vocab_block, std::int64_t, std::int64_t first_token,
                             std::int64_t tokens, std::int64_t block_depth, const Element* w,
                             std::int64_t vocab_count, std::int64_t depth, std::int64_t first_panel,
                             std::int64_t panels, float* HWY_RESTRICT c, std::int64_t ldc) {
    const std::int64_t steps = vocab_count / 32;
    for (std::int64_t s = 0; s < steps; s += kGradientDepth) {
      const std::int64_t n = std::min(kGradientDepth, steps - s);
      for (std::int64_t q = 0; q < panels; ++q) {
        const Element* b = w + (first_panel + q) * depth * kPanel + s * kStep;
        for (std::int64_t t = 0; t < tokens; t += kRows) {
          Tiles::Multiply(vocab_block + ((first_token + t) / 32 * (block_depth / 32) + s) * kStep,
                          kStep, b, kStep, n, c + t * ldc + q * kPanel, ldc, true, tokens - t);
        }
      }
    }
  }

 private:
  // Loads row k of the operand, 0 past the last.
  static HWY_INLINE void LoadPadded(const MatrixRows& m, std::int64_t first, std::int64_t k,
                                    std::int64_t count, std::int64_t column, std::int64_t n,
                                    std::uint16_t* HWY_RESTRICT to) {
    if (k >= count || n < kPanel) std::memset(to, 0, kPanel * sizeof(std::uint16_t));
    if (k < count) LoadRowBits(m, first + k, column, n, to);
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

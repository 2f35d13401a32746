// Far-field part of a chunk's scratch: tile masses, the selected tiles, and the gradients of
// skipped ones from their masses.
#if defined(LOGITLESS_FAR_MASSES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_FAR_MASSES_INL_H
#undef LOGITLESS_FAR_MASSES_INL_H
#else
#define LOGITLESS_FAR_MASSES_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/head/chunk-inl.h"
#include "math/lse_state.h"
#include "math/softcap.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Blocks of far_row_block tokens, and the state of each tile for each block.
template <class Engine>
class FarMemory : public ChunkMemory<Engine> {
 public:
  using Base = ChunkMemory<Engine>;
  using Base::layout;
  static constexpr std::int64_t kPanel = Engine::kPanel;
  static constexpr std::int64_t kBlockPanels = far_block_panels(Engine::kPanel);
  static constexpr std::int64_t kBlock = kBlockPanels * kPanel;

  explicit FarMemory(const ChunkCommon& chunk)
      : Base(chunk), blocks(ceil_div(this->panels, kBlockPanels)) {}

  std::int64_t part_of(std::int64_t tile) const { return tile / layout.tiles_per_part; }
  std::uint16_t* threshold(std::int64_t segment) const {
    return this->template at<std::uint16_t>(layout.threshold) + segment * layout.tokens;
  }
  // [blocks] of one tile: 1 where it is selected.
  std::uint8_t* selected(std::int64_t tile) const {
    return this->template at<std::uint8_t>(layout.selected) + tile * blocks;
  }
  // Start of each tile's pairs in the vocabulary block. A pair is a tile and a block of tokens that
  // selects or samples it; a tile's selected pairs come first.
  std::int32_t* pair_begin() const { return this->template at<std::int32_t>(layout.pair_begin); }
  // Errors of the sample's estimates in far_both, by tile of the vocabulary block.
  FarSampled* of_sample() const { return this->template at<FarSampled>(layout.of_sample); }
  typename Engine::Element* pair(std::int64_t index) const {
    return this->block_gradient() + index * kVocabTile * kBlock;
  }
  float* tile_gradient(std::int64_t tile) const {
    return this->template at<float>(layout.tile_gradient) + tile * layout.dim_n;
  }
  float* tile_sum() const { return this->template at<float>(layout.tile_sum); }
  float* gamma_hidden() const { return this->template at<float>(layout.gamma_hidden); }
  typename Engine::Element* squares(std::int64_t panel) const {
    return this->template at<typename Engine::Element>(layout.squares) +
           panel * kPanel * layout.dim_k;
  }
  // Exponents and sums of the estimated masses of a group of kVocabTile tiles.
  float* estimate_exponent(std::int64_t group) const {
    return this->template at<float>(layout.estimate) + group * 2 * layout.tokens;
  }
  float* estimate_sum(std::int64_t group) const { return estimate_exponent(group) + layout.tokens; }
  // Panels of one block.
  std::int64_t first_panel(std::int64_t block) const { return block * kBlockPanels; }
  std::int64_t end_panel(std::int64_t block) const {
    return std::min(this->panels, (block + 1) * kBlockPanels);
  }

  const std::int64_t blocks;
};

// Writes the threshold codes, tau of each token's total: a mass above selects its tile. Tokens with
// alpha 0 select nothing (`alpha` null: no such tokens).
template <class Engine>
void SetThresholds(const ChunkCommon& chunk, const FarMemory<Engine>& memory, float tau,
                   const float* alpha, const float* log2_total) {
  const Layout& layout = memory.layout;
  const float log2_tau = std::log2(tau);
  parallel_for(chunk.threads, layout.segments, [&](std::int64_t segment, int) {
    const float* base = memory.mass_base(segment, 0);
    std::uint16_t* threshold = memory.threshold(segment);
    for (std::int64_t t = 0; t < memory.tokens; ++t) {
      std::int32_t code = kMassTop;
      if (t < chunk.tokens && (alpha == nullptr || alpha[t] != 0.0f) && base[t] > -INFINITY) {
        const float steps = (log2_total[t] + log2_tau - base[t]) * kMassSteps;
        // A mass too large for the codes is selected; a NaN selects nothing.
        code = steps >= static_cast<float>(kMassTop - 1 - kMassBase) ? kMassTop - 1
               : steps > static_cast<float>(-kMassBase)
                   ? static_cast<std::int32_t>(std::floor(steps)) + kMassBase
               : std::isnan(steps) ? kMassTop
                                   : 0;
      }
      threshold[t] = static_cast<std::uint16_t>(code);
    }
  });
}

// Code offset that a tile's caution adds to its masses. log2_caution [tiles] or null: none.
inline int CautionOf(const float* log2_caution, std::int64_t tile) {
  return log2_caution == nullptr ? 0
                                 : static_cast<int>(std::min(log2_caution[tile] * kMassSteps,
                                                             static_cast<float>(kMassTop)));
}
inline int WithCaution(std::uint16_t code, int caution) {
  return code == 0 ? 0 : std::min(code + caution, kMassTop);
}

// Selects a tile for a block when the mass of one of its tokens, caution included, is above the
// token's threshold.
template <class Engine>
void MarkTiles(const ChunkCommon& chunk, const FarMemory<Engine>& memory, float tau,
               const float* alpha, const float* log2_total, const float* log2_caution) {
  const Layout& layout = memory.layout;
  SetThresholds(chunk, memory, tau, alpha, log2_total);
  parallel_for(chunk.threads, layout.tiles, [&](std::int64_t tile, int) {
    const std::uint16_t* mass = memory.tile_mass(tile, 0);
    const std::uint16_t* threshold = memory.threshold(memory.part_of(tile));
    std::uint8_t* selected = memory.selected(tile);
    const int caution = CautionOf(log2_caution, tile);
    for (std::int64_t block = 0; block < memory.blocks; ++block) {
      const std::int64_t end = memory.end_panel(block) * Engine::kPanel;
      unsigned above = 0;
      for (std::int64_t t = block * memory.kBlock; t < end; ++t) {
        above |= static_cast<unsigned>(WithCaution(mass[t], caution) > threshold[t]);
      }
      selected[block] = static_cast<std::uint8_t>(above);
    }
  });
}

template <class Engine>
std::int64_t CountSelected(const FarMemory<Engine>& memory) {
  std::int64_t count = 0;
  const std::int64_t all = memory.layout.tiles * memory.blocks;
  for (std::int64_t i = 0; i < all; ++i) count += memory.selected(0)[i];
  return count;
}

// Selects all tiles where more than most_selected of them are selected.
template <class Engine>
void KeepAllOfMany(const FarMemory<Engine>& memory, double most_selected) {
  const std::int64_t all = memory.layout.tiles * memory.blocks;
  if (static_cast<double>(CountSelected(memory)) > most_selected * static_cast<double>(all))
    std::memset(memory.selected(0), 1, static_cast<std::size_t>(all));
}

// Removes the targets' own part from the masses of skipped tiles, since their exact coefficients
// include it. The remainder has the absolute rounding error of the original mass, which initialises
// the bound.
template <class Engine>
void RemoveTargets(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory) {
  const std::int64_t per_token = chunk.features->targets_per_token;
  const double cap = chunk.features->softcap;
  parallel_for(chunk.threads, chunk.tokens, [&](std::int64_t t, int) {
    const std::int32_t* vocab_ids = chunk.targets.vocab_ids + t * per_token;
    double lost = 0.0;
    for (std::int64_t k = 0; k < per_token; ++k) {
      if (vocab_ids[k] < 0 || std::find(vocab_ids, vocab_ids + k, vocab_ids[k]) != vocab_ids + k)
        continue;
      const std::int64_t tile = vocab_ids[k] / kVocabTile;
      if (memory.selected(tile)[t / memory.kBlock] != 0) continue;
      std::uint16_t* code = memory.tile_mass(tile, 0) + t;
      if (*code == 0) continue;
      const double base = memory.mass_base(memory.part_of(tile), 0)[t];
      const double z = static_cast<double>(chunk.target_logit[t * per_token + k]);
      const double mass = std::exp2(static_cast<double>(*code - kMassBase) / kMassSteps);
      lost += mass * std::exp2(base - static_cast<double>(chunk.exponent[t])) *
              static_cast<double>(chunk.points.radius[tile] + chunk.points.centroid_norm[tile]);
      const double rest = mass - std::exp2(z * kLog2E - base) * softcap_slope(z, cap);
      const double steps = rest > 0.0 ? std::log2(rest) * kMassSteps + kMassBase : 0.0;
      *code = static_cast<std::uint16_t>(std::clamp(std::nearbyint(steps), 0.0, 65535.0));
    }
    chunk.bound[t] = static_cast<float>(lost) * kMassError * std::fabs(chunk.alpha[t]);
  });
}

// Gradient da of one tile as a point for one panel: mass * alpha. to [kPanel].
template <class Engine>
void FarRow(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t tile,
            std::int64_t panel, float* HWY_RESTRICT to) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t token = panel * Engine::kPanel;
  const float* base = memory.mass_base(memory.part_of(tile), panel);
  const std::uint16_t* mass = memory.tile_mass(tile, panel);
  for (std::int64_t t = 0; t < Engine::kPanel; t += lanes) {
    const V alpha = hn::LoadU(d, chunk.alpha + token + t);
    const V shift = hn::Sub(LoadMass(mass + t, hn::LoadU(d, base + t)),
                            hn::LoadU(d, chunk.exponent + token + t));
    const V e = hn::IfThenElse(hn::IsNaN(alpha), alpha, Exp2(shift));
    // Padding has alpha 0 and arbitrary masses.
    hn::Store(hn::IfThenZeroElse(hn::Eq(alpha, hn::Zero(d)), hn::Mul(alpha, e)), d, to + t);
  }
}

// Gradient da of skipped tiles [first, + tiles), at most kVocabTile, for one panel: 0 where
// selected. g [kVocabTile][kPanel].
template <class Engine>
void FarGradient(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t first,
                 std::int64_t tiles, std::int64_t panel, float* HWY_RESTRICT g) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const std::int64_t block = panel / memory.kBlockPanels;
  for (std::int64_t r = 0; r < kVocabTile; ++r) {
    float* to = g + r * kPanel;
    if (r >= tiles || memory.selected(first + r)[block] != 0) {
      std::memset(to, 0, kPanel * sizeof(float));
    } else {
      FarRow(chunk, memory, first + r, panel, to);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

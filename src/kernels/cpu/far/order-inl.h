// Sorts a chunk's tokens by the tiles that they select. A block selects the union of its tokens'
// tiles, so blocks of similar tokens select fewest. Tokens are similar if their last tile is in the
// same part of the order: rare entries are at its end, and most tokens need none. Among those, the
// mean position of their tiles counts.
#if defined(LOGITLESS_FAR_ORDER_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_FAR_ORDER_INL_H
#undef LOGITLESS_FAR_ORDER_INL_H
#else
#define LOGITLESS_FAR_ORDER_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/far/masses-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

template <class Engine>
void RunFarKeys(const FarKeys& chunk) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const FarMemory<Engine> memory(chunk);
  const Layout& layout = memory.layout;
  SetThresholds(chunk, memory, chunk.tau, chunk.alpha, chunk.log2_total);
  const auto tiles = static_cast<std::int32_t>(layout.tiles);
  parallel_for(chunk.threads, memory.panels, [&](std::int64_t panel, int) {
    std::int32_t count[kPanel] = {}, last[kPanel] = {};
    std::int64_t sum[kPanel] = {};
    const std::int64_t first = panel * kPanel;
    for (std::int32_t tile = 0; tile < tiles; ++tile) {
      const std::uint16_t* mass = memory.tile_mass(tile, panel);
      const std::uint16_t* threshold = memory.threshold(memory.part_of(tile)) + first;
      const int caution = CautionOf(chunk.caution, tile);
      for (std::int64_t t = 0; t < kPanel; ++t) {
        const bool selected = WithCaution(mass[t], caution) > threshold[t];
        count[t] += selected ? 1 : 0;
        last[t] = selected ? tile : last[t];
        sum[t] += selected ? tile : 0;
      }
    }
    const std::int64_t end = std::min<std::int64_t>(kPanel, chunk.tokens - first);
    for (std::int64_t t = 0; t < end; ++t) {
      const std::int64_t place =
          count[t] == 0 ? 0 : sum[t] * kFarPositions / (std::int64_t{count[t]} * tiles);
      const std::int64_t part = std::int64_t{last[t]} * kFarClasses / tiles;
      chunk.keys[first + t] = std::isnan(chunk.log2_total[first + t]) ? kFarKeys - 1
                              : count[t] == 0
                                  ? kFarKeys - 2
                                  : static_cast<std::int32_t>(part * kFarPositions + place);
    }
  });
}

template <class Engine>
void RunFarMove(const FarMove& chunk) {
  const FarMemory<Engine> memory(chunk);
  const Layout& layout = memory.layout;
  const auto move = [&](auto* values, int thread) {
    using T = std::remove_pointer_t<decltype(values)>;
    auto* const old = reinterpret_cast<T*>(chunk.scratch + thread * chunk.sizes.tokens);
    std::copy_n(values, chunk.tokens, old);
    for (std::int64_t t = 0; t < chunk.tokens; ++t) values[t] = old[chunk.from[t]];
  };
  parallel_for(chunk.threads, layout.segments, [&](std::int64_t segment, int thread) {
    move(memory.mass_base(segment, 0), thread);
  });
  parallel_for(chunk.threads, layout.tiles,
               [&](std::int64_t tile, int thread) { move(memory.tile_mass(tile, 0), thread); });
  PackAllTokens(chunk, memory);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

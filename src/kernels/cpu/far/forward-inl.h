// Forward of the far field over one chunk: the mass of every tile estimated from two moments of its
// rows, and exact logits for the selected tiles.
//
// estimate: a task per 128 tiles, as a dense forward in which tiles take the place of vocabulary
//           entries. Means are multiplied with the tokens, variances with the squares of the tokens
//           along the principal axes: two blocks of logits, 128 times smaller than the vocabulary.
// near:     a task per segment, as in the dense forward, over the selected tiles and blocks.
#if defined(LOGITLESS_FAR_FORWARD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_FAR_FORWARD_INL_H
#undef LOGITLESS_FAR_FORWARD_INL_H
#else
#define LOGITLESS_FAR_FORWARD_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/far/masses-inl.h"
#include "kernels/cpu/far/points-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

template <class Engine>
MatrixRows FarMatrix(const void* data, std::int64_t dim) {
  return {data, FarDtype<Engine>(), dim, 1, nullptr};
}

// Computes (x . axis)^2 of kVocabTile axes for all tokens.
template <class Engine>
void SquareAlongAxes(const FarForwardChunk& chunk, const FarMemory<Engine>& memory,
                     std::int64_t group, int thread) {
  [[maybe_unused]] const typename Engine::Session session;
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t first = group * kVocabTile;
  const std::int64_t axes = std::min(kVocabTile, chunk.shape.dim - first);
  auto* tile = memory.template of_thread<typename Engine::Element>(thread, layout.weight_tile);
  float* z = memory.template of_thread<float>(thread, layout.logits);
  Engine::PackWeightTile(FarMatrix<Engine>(chunk.points.axes, chunk.shape.dim), first, axes,
                         chunk.shape.dim, layout.dim_k, tile);
  for (std::int64_t p = 0; p < memory.panels; ++p) {
    const std::int64_t tokens = std::min<std::int64_t>(kPanel, chunk.tokens - p * kPanel);
    Engine::Logits(tile, round_up(axes, Engine::kRows), memory.x_forward(p), tokens, layout.dim_k,
                   z);
    std::memset(z + axes * kPanel, 0,
                static_cast<std::size_t>((kVocabTile - axes) * kPanel) * sizeof(float));
    for (std::int64_t i = 0; i < axes * kPanel; i += lanes) {
      const V v = hn::Load(d, z + i);
      hn::Store(hn::Mul(v, v), d, z + i);
    }
    Engine::EmitTokens(z, first, layout.dim_k, memory.squares(p));
  }
}

// Computes the log2 estimates of one panel in z [tiles][kPanel] from x . mean and the quadratic
// forms q [tiles][kPanel]. Stores their codes, and the sum of the masses that the codes represent.
template <class Engine>
void KeepEstimates(const FarForwardChunk& chunk, const FarMemory<Engine>& memory,
                   std::int64_t first_tile, std::int64_t tiles, std::int64_t panel,
                   float* HWY_RESTRICT z, const float* HWY_RESTRICT q) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const D d;
  const DU16 du16;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const float s = chunk.features->logit_scale;
  const V linear = hn::Set(d, s * kLog2EFloat);
  const V square = hn::Set(d, 0.5f * s * s * kLog2EFloat);
  const V lowest = hn::Set(d, -INFINITY);
  float* exponent = memory.estimate_exponent(first_tile / kVocabTile) + panel * kPanel;
  float* sums = memory.estimate_sum(first_tile / kVocabTile) + panel * kPanel;
  for (std::int64_t t = 0; t < kPanel; t += lanes) {
    V top = lowest;
    for (std::int64_t r = 0; r < tiles; ++r) {
      const V base = hn::Set(d, chunk.points.log2_base[first_tile + r]);
      const V form = hn::MulAdd(square, hn::Load(d, q + r * kPanel + t), base);
      const V estimate = hn::MulAdd(linear, hn::Load(d, z + r * kPanel + t), form);
      hn::Store(estimate, d, z + r * kPanel + t);
      top = hn::Max(top, estimate);
    }
    const V k = hn::IfThenElse(hn::Gt(top, lowest), hn::Ceil(top), hn::Zero(d));
    V sum = hn::Zero(d);
    V base = lowest;
    for (std::int64_t r = 0; r < tiles; ++r) {
      const std::int64_t tile = first_tile + r;
      const V estimate = hn::Load(d, z + r * kPanel + t);
      sum = hn::Add(sum, Exp2(hn::Sub(estimate, k)));
      float* selected_base = memory.mass_base(memory.part_of(tile), panel) + t;
      if (tile % layout.tiles_per_part == 0) base = lowest;
      base = hn::IfThenElse(hn::Eq(base, lowest), hn::Ceil(estimate), base);
      hn::StoreU(base, d, selected_base);
      hn::StoreU(hn::DemoteTo(du16, MassCode(estimate, base)), du16,
                 memory.tile_mass(tile, panel) + t);
    }
    hn::StoreU(k, d, exponent + t);
    hn::StoreU(sum, d, sums + t);
  }
}

template <class Engine>
void EstimateGroup(const FarForwardChunk& chunk, const FarMemory<Engine>& memory,
                   std::int64_t group, int thread) {
  [[maybe_unused]] const typename Engine::Session session;
  using Element = typename Engine::Element;
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const std::int64_t dim = chunk.shape.dim;
  const std::int64_t first = group * kVocabTile;
  const std::int64_t tiles = std::min(kVocabTile, layout.tiles - first);
  auto* means = memory.template of_thread<Element>(thread, layout.weight_tile);
  auto* variances = memory.template of_thread<Element>(thread, layout.variance_tile);
  float* z = memory.template of_thread<float>(thread, layout.logits);
  float* q = memory.template of_thread<float>(thread, layout.forms);
  Engine::PackWeightTile(FarMatrix<Engine>(chunk.points.mean, dim), first, tiles, dim, layout.dim_k,
                         means);
  Engine::PackWeightTile(FarMatrix<Engine>(chunk.points.variance, dim), first, tiles, dim,
                         layout.dim_k, variances);
  for (std::int64_t p = 0; p < memory.panels; ++p) {
    const std::int64_t tokens = std::min<std::int64_t>(kPanel, chunk.tokens - p * kPanel);
    const std::int64_t rows = round_up(tiles, Engine::kRows);
    Engine::Logits(means, rows, memory.x_forward(p), tokens, layout.dim_k, z);
    Engine::Logits(variances, rows, memory.squares(p), tokens, layout.dim_k, q);
    KeepEstimates(chunk, memory, first, tiles, p, z, q);
  }
}

// log2 of the sum of all estimates of one panel.
template <class Engine>
void TotalEstimates(const FarMemory<Engine>& memory, std::int64_t panel, float* total) {
  const std::int64_t groups = ceil_div(memory.layout.tiles, kVocabTile);
  for (std::int64_t t = panel * Engine::kPanel; t < (panel + 1) * Engine::kPanel; ++t) {
    float top = -INFINITY;
    for (std::int64_t g = 0; g < groups; ++g) {
      if (memory.estimate_sum(g)[t] != 0.0f) top = std::max(top, memory.estimate_exponent(g)[t]);
    }
    double sum = 0.0;
    for (std::int64_t g = 0; g < groups && top > -INFINITY; ++g)
      sum += memory.estimate_sum(g)[t] *
             std::exp2(static_cast<double>(memory.estimate_exponent(g)[t]) - top);
    total[t] = top + static_cast<float>(std::log2(sum));
  }
}

// Predicate of a segment's forward over selected tiles. Every target's tile is selected for its
// block. So no target is skipped, except those of tokens with a NaN total.
template <class Engine>
struct KeepNear {
  const FarMemory<Engine>& memory;
  bool any(std::int64_t tile) const {
    const std::uint8_t* selected = memory.selected(tile);
    return std::find(selected, selected + memory.blocks, 1) != selected + memory.blocks;
  }
  bool operator()(std::int64_t tile, std::int64_t panel) const {
    return memory.selected(tile)[panel / FarMemory<Engine>::kBlockPanels] != 0;
  }
};

// Adds the masses of skipped tiles to the sums of one panel.
template <class Engine>
void AddFarMass(const FarForwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t panel) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t block = panel / memory.kBlockPanels;
  const float* total = chunk.log2_total + panel * kPanel;
  for (std::int64_t t = 0; t < kPanel; t += lanes) {
    HWY_ALIGN float exponent[kMaxLanes];
    HWY_ALIGN float sums[kMaxLanes];
    for (std::int64_t i = 0; i < lanes; ++i) {
      const std::int64_t token = panel * kPanel + t + i;
      const bool real = token < chunk.tokens;
      exponent[i] = real ? chunk.exponent[token] : 0.0f;
      sums[i] = real ? chunk.sum[token] : 0.0f;
    }
    const V near_exponent = hn::Load(d, exponent);
    const V near_sum = hn::Load(d, sums);
    const V estimated = hn::Ceil(hn::LoadU(d, total + t));
    // Without selected tiles, as on a rank that has no target, the near exponent is meaningless.
    const auto nothing = hn::Eq(near_sum, hn::Zero(d));
    const auto far_only = hn::And(nothing, hn::Gt(estimated, hn::Set(d, -INFINITY)));
    const V top = hn::IfThenElse(far_only, estimated, hn::Max(near_exponent, estimated));
    V sum = hn::IfThenZeroElse(nothing, hn::Mul(near_sum, PowerOfTwo(hn::Sub(near_exponent, top))));
    for (std::int64_t segment = 0; segment < layout.segments; ++segment) {
      const V base = hn::LoadU(d, memory.mass_base(segment, panel) + t);
      const std::int64_t end = std::min(layout.tiles, (segment + 1) * layout.tiles_per_part);
      V part = hn::Zero(d);
      for (std::int64_t tile = segment * layout.tiles_per_part; tile < end; ++tile) {
        if (memory.selected(tile)[block] != 0) continue;
        part = hn::Add(part, Exp2(hn::Sub(LoadMass(memory.tile_mass(tile, panel) + t, base), top)));
      }
      sum = hn::Add(sum, part);
    }
    hn::Store(top, d, exponent);
    hn::Store(sum, d, sums);
    for (std::int64_t i = 0; i < lanes; ++i) {
      const std::int64_t token = panel * kPanel + t + i;
      if (token >= chunk.tokens) break;
      chunk.exponent[token] = exponent[i];
      chunk.sum[token] = sums[i];
    }
  }
}

// sum_j omega_j z_ij without logits: s (x_i . sum_j omega_j w_j + sum_j omega_j b_j).
inline void WeightedSums(const FarForwardChunk& chunk) {
  const double scale = chunk.features->logit_scale;
  double biased = 0.0;
  for (std::int64_t j = 0; j < chunk.shape.vocab && chunk.bias != nullptr; ++j)
    biased += (chunk.logit_weights == nullptr ? 1.0 : chunk.logit_weights[j]) *
              static_cast<double>(chunk.bias[j]);
  parallel_for(chunk.threads, chunk.tokens, [&](std::int64_t t, int) {
    constexpr std::int64_t kStep = 256;
    float x[kStep];
    double sum = 0.0;
    for (std::int64_t at = 0; at < chunk.shape.dim; at += kStep) {
      const std::int64_t n = std::min(kStep, chunk.shape.dim - at);
      LoadRow(chunk.hidden, t, at, n, x);
      for (std::int64_t k = 0; k < n; ++k)
        sum += static_cast<double>(x[k]) * chunk.points.weighted_total[at + k];
    }
    chunk.weighted_sum[t] = scale * (sum + biased);
  });
}

template <class Engine>
void RunFarEstimate(const FarForwardChunk& chunk) {
  const FarMemory<Engine> memory(chunk);
  PackAllTokens(chunk, memory);
  parallel_for(
      chunk.threads, ceil_div(chunk.shape.dim, kVocabTile),
      [&](std::int64_t group, int thread) { SquareAlongAxes(chunk, memory, group, thread); });
  const std::int64_t groups = ceil_div(memory.layout.tiles, kVocabTile);
  parallel_for(chunk.threads, groups, [&](std::int64_t group, int thread) {
    EstimateGroup(chunk, memory, group, thread);
  });
  parallel_for(chunk.threads, memory.panels,
               [&](std::int64_t p, int) { TotalEstimates(memory, p, chunk.log2_total); });
}

template <class Engine>
void RunFarForward(const FarForwardChunk& call) {
  const FarMemory<Engine> memory(call);
  FarForwardChunk chunk = call;
  chunk.weighted_sum = nullptr;  // needs the full vocabulary, not only selected tiles
  const Layout& layout = memory.layout;
  MarkTiles(chunk, memory, chunk.tau, nullptr, chunk.log2_total, chunk.points.log2_caution);
  for (std::int64_t tile = 0; tile < layout.tiles; ++tile) {
    for (std::int32_t e = chunk.targets.tile_begin[tile]; e < chunk.targets.tile_begin[tile + 1];
         ++e) {
      const std::int64_t token = chunk.targets.entries[e].token;
      if (!std::isnan(chunk.log2_total[token])) memory.selected(tile)[token / memory.kBlock] = 1;
    }
  }
  KeepAllOfMany(memory, chunk.most_selected);
  parallel_for(chunk.threads, layout.segments, [&](std::int64_t segment, int thread) {
    ForwardPart<Engine, float>(chunk, memory, segment, thread, KeepNear<Engine>{memory});
  });
  parallel_for(chunk.threads, memory.panels, [&](std::int64_t p, int) {
    MergeSegments(chunk, memory, p);
    AddFarMass(chunk, memory, p);
  });
  if (call.weighted_sum != nullptr) WeightedSums(call);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

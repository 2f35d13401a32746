// Backward of the far field over one chunk (block-sparse): exact for selected tiles, by mass for
// skipped ones.
//
// far:  a dense backward in which tiles take the place of vocabulary entries. Masses are its
//       logit gradients and centroids its weights: 128 times smaller than the vocabulary.
// near: vocabulary blocks of selected tiles, in two phases.
//   Phase 1, a task per tile: recomputes its logits for the blocks that select or sample it, then
//   their gradients and d_weight of its entries, including the part of skipped pairs.
//   Phase 2, a task per block of tokens and columns: d_hidden += gradient . weights, over the
//   block's selected tiles.
#if defined(LOGITLESS_FAR_BACKWARD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_FAR_BACKWARD_INL_H
#undef LOGITLESS_FAR_BACKWARD_INL_H
#else
#define LOGITLESS_FAR_BACKWARD_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/far/masses-inl.h"
#include "kernels/cpu/far/points-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

inline PanelCoefficients CoefficientsAt(const BackwardChunk& chunk, std::int64_t token) {
  return {chunk.exponent + token, chunk.alpha + token,
          chunk.beta == nullptr ? nullptr : chunk.beta + token, nullptr};
}

// Computes d_hidden of the skipped tiles, and the gradient of each tile as one point: tile_gradient
// = sum_i F_iJ x_i, tile_sum = sum_i F_iJ.
template <class Engine>
void FarGemms(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory) {
  using Element = typename Engine::Element;
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const bool d_hidden = chunk.d_hidden.data != nullptr;
  const bool d_weight = chunk.d_weight.data != nullptr;
  const MatrixRows centroids{chunk.points.centroid, FarDtype<Engine>(), chunk.shape.dim, 1,
                             nullptr};
  const std::int64_t groups = ceil_div(layout.tiles, kVocabTile);
  const std::int64_t block_groups = chunk.sizes.block_vocab / kVocabTile;
  std::memset(memory.tile_sum(), 0, static_cast<std::size_t>(groups * kVocabTile) * sizeof(float));
  for (std::int64_t first = 0; first < groups; first += block_groups) {
    const std::int64_t count = std::min(block_groups, groups - first);
    parallel_for(chunk.threads, count, [&](std::int64_t group, int thread) {
      [[maybe_unused]] const typename Engine::Session session;
      const std::int64_t tile = (first + group) * kVocabTile;
      const std::int64_t tiles = std::min(kVocabTile, layout.tiles - tile);
      float* g = memory.template of_thread<float>(thread, layout.logits);
      const auto gradient = Engine::TileGradient(
          memory.block_gradient(), group,
          memory.template of_thread<Element>(thread, layout.gradient_tile), layout);
      for (std::int64_t p = 0; p < memory.panels; ++p) {
        FarGradient(chunk, memory, tile, tiles, p, g);
        if (chunk.d_bias != nullptr) SumTokens<kPanel>(tiles, g, memory.tile_sum() + tile);
        Engine::EmitGradient(gradient, p, group, 0, g);
      }
      if (d_weight) {
        std::memset(memory.tile_gradient(tile), 0,
                    static_cast<std::size_t>(kVocabTile * layout.dim_n) * sizeof(float));
        for (std::int64_t column = 0; column < layout.dim_n; column += layout.column_block) {
          const std::int64_t columns = std::min(layout.column_block, layout.dim_n - column);
          Engine::WeightGradient(gradient, tiles, memory.x_backward(), memory.tokens, layout.tokens,
                                 column / kPanel, columns / kPanel,
                                 memory.tile_gradient(tile) + column, layout.dim_n);
        }
      }
      if (d_hidden) {
        Engine::PackRows(centroids, tile, tiles, kVocabTile, chunk.shape.dim, group * kVocabTile,
                         chunk.sizes.block_vocab, memory.block_weight());
      }
    });
    if (d_hidden) AddBlockToHidden(chunk, memory, count);
  }
}

// Bounds the error of each token's d_hidden over the skipped tiles: sum_J |F_iJ| r_J plus the
// rounding of masses to 16 bits. Adds to the bound that RemoveTargets initialised.
template <class Engine>
void FarBounds(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t panel,
               float* HWY_RESTRICT g) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  float bound[kPanel] = {};
  for (std::int64_t tile = 0; tile < layout.tiles; tile += kVocabTile) {
    const std::int64_t tiles = std::min(kVocabTile, layout.tiles - tile);
    FarGradient(chunk, memory, tile, tiles, panel, g);
    for (std::int64_t r = 0; r < tiles; ++r) {
      const float radius = chunk.points.radius[tile + r] * (1.0f + kMassError) +
                           chunk.points.centroid_norm[tile + r] * kMassError;
      for (std::int64_t t = 0; t < kPanel; ++t) bound[t] += std::fabs(g[r * kPanel + t]) * radius;
    }
  }
  const std::int64_t tokens = std::min<std::int64_t>(kPanel, chunk.tokens - panel * kPanel);
  for (std::int64_t t = 0; t < tokens; ++t) chunk.bound[panel * kPanel + t] += bound[t];
}

// Calls f(block, pair, sampled) for the blocks that select or sample a tile, in order. Pairs of the
// tile are numbered from 0, selected ones first.
template <class Engine, class F>
void ForPairs(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t tile,
              const F& f) {
  const std::uint8_t* selected = memory.selected(tile);
  std::int32_t near = 0, sampled = 0;
  for (std::int64_t block = 0; block < memory.blocks; ++block) sampled += selected[block];
  for (std::int64_t block = 0; block < memory.blocks; ++block) {
    if (selected[block] != 0) {
      f(block, near++, false);
    } else if (chunk.sample.takes(tile, block)) {
      f(block, sampled++, true);
    }
  }
}

// Returns a token's total after replacing a tile's estimate by its exact mass; both are relative to
// the old total. A total is never below the exact mass, whatever the rounding.
inline float WithExactMass(float estimated, float exact) {
  const float total = std::max(1.0f + (exact - estimated), exact);
  return total > 0.0f || std::isnan(total) ? total : 1.0f;
}

// Normalises g [vocabulary entries][kPanel] of a sampled tile with its exact mass instead of its
// estimate far [kPanel].
template <std::int64_t kPanel>
void NormalizeSampled(const FarBackwardChunk& chunk, std::int64_t first,
                      const float* HWY_RESTRICT far, std::int64_t vocab_count,
                      float* HWY_RESTRICT g, FarSampled& found) {
  float sums[kPanel] = {};
  for (std::int64_t r = 0; r < vocab_count; ++r)
    for (std::int64_t t = 0; t < kPanel; ++t) sums[t] += g[r * kPanel + t];
  for (std::int64_t t = 0; t < kPanel; ++t) {
    const std::int64_t token = first + t;
    if (token >= chunk.tokens || chunk.alpha[token] == 0.0f) {
      sums[t] = 1.0f;
      continue;
    }
    const float alpha =  // chunk.alpha is relative to 2^exponent
        chunk.alpha[token] * std::exp2(chunk.log2_total[token] - chunk.exponent[token]);
    const float exact = sums[t] / alpha, estimated = far[t] / alpha;
    const auto off = static_cast<double>(exact - estimated);
    found.add({1.0, off * off, static_cast<double>(exact)});
    sums[t] = 1.0f / WithExactMass(estimated, exact);
  }
  for (std::int64_t r = 0; r < vocab_count; ++r)
    for (std::int64_t t = 0; t < kPanel; ++t) g[r * kPanel + t] *= sums[t];
}

// Gradient of a sampled pair: the exact one minus that of the tile's mass, times `every`.
template <class Engine>
void SubtractFar(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t tile,
                 std::int64_t panel, std::int64_t vocab_count, float* HWY_RESTRICT g,
                 FarSampled& found) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  HWY_ALIGN float far[kPanel];
  FarRow(chunk, memory, tile, panel, far);
  if (chunk.preselected)
    NormalizeSampled<kPanel>(chunk, panel * kPanel, far, vocab_count, g, found);
  const float* share = chunk.points.share + tile * kVocabTile;
  const auto every = static_cast<float>(chunk.sample.every);
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    for (std::int64_t t = 0; t < kPanel; ++t)
      g[r * kPanel + t] = every * (g[r * kPanel + t] - share[r] * far[t]);
  }
}

// Gradient of the logits of one tile for the blocks that select or sample it, and its part of
// d_bias.
template <class Engine>
void NearGradient(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t tile,
                  std::int32_t first_pair, int thread, FarSampled& found) {
  using Element = typename Engine::Element;
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const std::int64_t vocab_begin = tile * kVocabTile;
  const std::int64_t vocab_count = std::min(kVocabTile, chunk.shape.vocab - vocab_begin);
  const LogitTransform transform = TileTransform(chunk, vocab_begin);
  auto* weights = memory.template of_thread<Element>(thread, layout.weight_tile);
  auto* tile_part = memory.template of_thread<Element>(thread, layout.gradient_tile);
  float* g = memory.template of_thread<float>(thread, layout.logits);
  Engine::PackWeightTile(chunk.weight, vocab_begin, vocab_count, chunk.shape.dim, layout.dim_k,
                         weights);
  EntryCursor zeros(chunk.targets, tile);
  ForPairs(chunk, memory, tile, [&](std::int64_t block, std::int32_t pair, bool sampled) {
    zeros.until(block * memory.kBlock, [](const SparseEntry&) {});
    const auto gradient = Engine::PairGradient(memory.pair(first_pair + pair), memory.kBlock,
                                               tile_part, memory.first_panel(block), layout);
    for (std::int64_t p = memory.first_panel(block); p < memory.end_panel(block); ++p) {
      const std::int64_t first = p * kPanel;
      const std::int64_t tokens = std::min<std::int64_t>(kPanel, chunk.tokens - first);
      Engine::Logits(weights, round_up(vocab_count, Engine::kRows), memory.x_forward(p), tokens,
                     layout.dim_k, g);
      TransformBlock<kPanel>(transform, vocab_count, g);
      GradientFromLogits<kPanel>(transform, CoefficientsAt(chunk, first), vocab_count, g);
      std::memset(g + vocab_count * kPanel, 0,
                  static_cast<std::size_t>((kVocabTile - vocab_count) * kPanel) * sizeof(float));
      zeros.until(first + kPanel, [&](const SparseEntry& e) {
        g[(e.vocab_id - vocab_begin) * kPanel + e.token - first] = 0.0f;
      });
      if (sampled) SubtractFar(chunk, memory, tile, p, vocab_count, g, found);
      if (chunk.d_bias != nullptr) SumTokens<kPanel>(vocab_count, g, chunk.d_bias + vocab_begin);
      Engine::EmitGradient(gradient, p - memory.first_panel(block), 0, 0, g);
    }
  });
}

// Phase 1 of one tile: all gradients of its vocabulary entries.
template <class Engine>
void NearTile(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t tile,
              std::int64_t block_tile, float gamma_total, int thread) {
  [[maybe_unused]] const typename Engine::Session session;
  using Element = typename Engine::Element;
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const std::int64_t vocab_begin = tile * kVocabTile;
  const std::int64_t vocab_count = std::min(kVocabTile, chunk.shape.vocab - vocab_begin);
  const std::int32_t first_pair = memory.pair_begin()[block_tile];
  const bool near = memory.pair_begin()[block_tile + 1] > first_pair;
  FarSampled found = {};
  if (near) NearGradient(chunk, memory, tile, first_pair, thread, found);
  if (chunk.preselected) memory.of_sample()[block_tile] = found;

  const SparseEntry* entries = chunk.targets.entries + chunk.targets.tile_begin[tile];
  const SparseEntry* entries_end = chunk.targets.entries + chunk.targets.tile_begin[tile + 1];
  const float* share = chunk.points.share + vocab_begin;
  const auto logit_weights = [&](std::int64_t r) {
    return chunk.logit_weights == nullptr ? 1.0f : chunk.logit_weights[vocab_begin + r];
  };
  if (chunk.d_bias != nullptr) {
    for (std::int64_t r = 0; r < vocab_count; ++r) {
      chunk.d_bias[vocab_begin + r] += share[r] * memory.tile_sum()[tile];
      if (chunk.gamma != nullptr) chunk.d_bias[vocab_begin + r] += logit_weights(r) * gamma_total;
    }
    for (const SparseEntry* e = entries; e != entries_end; ++e)
      chunk.d_bias[e->vocab_id] += chunk.coefficient[e->slot];
  }
  if (chunk.d_weight.data != nullptr) {
    float* c = memory.template of_thread<float>(thread, layout.d_weight);
    auto* tile_part = memory.template of_thread<Element>(thread, layout.gradient_tile);
    for (std::int64_t column = 0; column < chunk.shape.dim; column += layout.column_block) {
      const std::int64_t columns = std::min(layout.column_block, chunk.shape.dim - column);
      LoadWeightGradient(chunk.d_weight, chunk.shape.dim, vocab_begin, vocab_count,
                         round_up(vocab_count, Engine::kRows), column, columns, c,
                         layout.column_block);
      ForPairs(chunk, memory, tile, [&](std::int64_t block, std::int32_t pair, bool) {
        const auto gradient = Engine::PairGradient(memory.pair(first_pair + pair), memory.kBlock,
                                                   tile_part, memory.first_panel(block), layout);
        Engine::WeightGradient(
            gradient, vocab_count, memory.x_backward() + block * memory.kBlock * kPanel,
            (memory.end_panel(block) - memory.first_panel(block)) * kPanel, layout.tokens,
            column / kPanel, ceil_div(columns, kPanel), c, layout.column_block);
      });
      for (std::int64_t r = 0; r < vocab_count; ++r) {
        float* to = c + r * layout.column_block;
        AddScaled(memory.tile_gradient(tile) + column, columns, share[r], to);
        if (chunk.gamma != nullptr)
          AddScaled(memory.gamma_hidden() + column, columns, logit_weights(r), to);
      }
      for (const SparseEntry* e = entries; e != entries_end; ++e) {
        AddRow(chunk.hidden, e->token, column, columns, chunk.coefficient[e->slot],
               c + (e->vocab_id - vocab_begin) * layout.column_block);
      }
      StoreWeightGradient(chunk.d_weight, chunk.shape.dim, vocab_begin, vocab_count, column,
                          columns, c, layout.column_block);
    }
  }
  if (near && chunk.d_hidden.data != nullptr) {
    Engine::PackRows(chunk.weight, vocab_begin, vocab_count, kVocabTile, chunk.shape.dim,
                     block_tile * kVocabTile, chunk.sizes.block_vocab, memory.block_weight());
  }
}

// Phase 2 over the selected tiles of the vocabulary block [first, + tiles).
template <class Engine>
void NearHidden(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory, std::int64_t first,
                std::int64_t tiles) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const std::int64_t column_blocks = ceil_div(layout.dim_n, layout.column_block);
  parallel_for(chunk.threads, memory.blocks * column_blocks, [&](std::int64_t task, int) {
    [[maybe_unused]] const typename Engine::Session session;
    const std::int64_t block = task / column_blocks;
    const std::int64_t column = task % column_blocks * layout.column_block;
    const std::int64_t columns = std::min(layout.column_block, layout.dim_n - column);
    const std::int64_t token = block * memory.kBlock;
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::uint8_t* selected = memory.selected(first + t);
      if (selected[block] == 0) continue;
      std::int32_t pair = memory.pair_begin()[t];
      for (std::int64_t b = 0; b < block; ++b) pair += selected[b];
      Engine::HiddenGradient(
          memory.pair(pair), memory.kBlock, 0, memory.end_panel(block) * kPanel - token, kVocabTile,
          memory.block_weight() + t * kVocabTile * kPanel, kVocabTile, chunk.sizes.block_vocab,
          column / kPanel, columns / kPanel, memory.d_hidden(token) + column, layout.dim_n);
    }
  });
}

// Finishes d_hidden of one panel: adds label smoothing and targets, computes its norms, copies rows
// for the audit, and stores the caller's rows.
template <class Engine>
void FinishFarHidden(const FarBackwardChunk& chunk, const FarMemory<Engine>& memory,
                     std::int64_t panel) {
  const std::int64_t dim = chunk.shape.dim;
  const std::int64_t first = panel * Engine::kPanel;
  const std::int64_t end = std::min<std::int64_t>(first + Engine::kPanel, chunk.tokens);
  for (std::int64_t t = first; t < end; ++t) {
    float* row = memory.d_hidden(t);
    if (chunk.gamma != nullptr) AddScaled(chunk.points.weighted_total, dim, chunk.gamma[t], row);
    AddTargets(chunk, t, row);
    chunk.norm_squared[t] = static_cast<double>(SquaredDistance(row, nullptr, dim));
    if (chunk.audit_row != nullptr && chunk.audit_row[t] >= 0) {
      std::memcpy(chunk.audit + chunk.audit_row[t] * dim, row,
                  static_cast<std::size_t>(dim) * sizeof(float));
    }
    StoreHidden(chunk, t, row);
  }
}

template <class Engine>
void RunFarBackward(const FarBackwardChunk& chunk) {
  const FarMemory<Engine> memory(chunk);
  const Layout& layout = memory.layout;
  const bool d_hidden = chunk.d_hidden.data != nullptr;
  std::fill_n(chunk.bound, chunk.tokens, 0.0f);
  if (!chunk.preselected) {
    MarkTiles(chunk, memory, chunk.tau, chunk.alpha, chunk.log2_total, nullptr);
    KeepAllOfMany(memory, chunk.most_selected);
    RemoveTargets(chunk, memory);
  }
  *chunk.selected += CountSelected(memory);
  *chunk.pairs += layout.tiles * memory.blocks;
  PackForBackward(chunk, memory);

  float gamma_total = 0.0f;
  if (chunk.gamma != nullptr) {
    for (std::int64_t t = 0; t < chunk.tokens; ++t) gamma_total += chunk.gamma[t];
    if (chunk.d_weight.data != nullptr) {
      std::memset(memory.gamma_hidden(), 0, static_cast<std::size_t>(chunk.shape.dim) * 4);
      for (std::int64_t t = 0; t < chunk.tokens; ++t)
        AddRow(chunk.hidden, t, 0, chunk.shape.dim, chunk.gamma[t], memory.gamma_hidden());
    }
  }
  FarGemms(chunk, memory);
  if (!chunk.preselected) {  // estimated masses have no bound
    parallel_for(chunk.threads, memory.panels, [&](std::int64_t p, int thread) {
      FarBounds(chunk, memory, p, memory.template of_thread<float>(thread, layout.logits));
    });
  }

  const std::int64_t block_tiles = chunk.sizes.block_vocab / kVocabTile;
  for (std::int64_t first = 0; first < layout.tiles; first += block_tiles) {
    const std::int64_t tiles = std::min(block_tiles, layout.tiles - first);
    std::int32_t pairs = 0;
    for (std::int64_t t = 0; t < tiles; ++t) {
      memory.pair_begin()[t] = pairs;
      ForPairs(chunk, memory, first + t, [&](std::int64_t, std::int32_t, bool sampled) {
        ++pairs;
        *chunk.sampled += sampled ? 1 : 0;
      });
    }
    memory.pair_begin()[tiles] = pairs;
    parallel_for(chunk.threads, tiles, [&](std::int64_t t, int thread) {
      NearTile(chunk, memory, first + t, t, gamma_total, thread);
    });
    for (std::int64_t t = 0; chunk.preselected && t < tiles; ++t)
      chunk.of_sample->add(memory.of_sample()[t]);
    if (d_hidden && pairs > 0) NearHidden(chunk, memory, first, tiles);
  }
  if (d_hidden) {
    parallel_for(chunk.threads, memory.panels,
                 [&](std::int64_t p, int) { FinishFarHidden(chunk, memory, p); });
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

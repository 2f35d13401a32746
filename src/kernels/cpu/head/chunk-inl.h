// Forward and backward of a kernel over one chunk of tokens, templated on the engine that
// multiplies tiles.
//
// forward:  tiles of 128 vocabulary entries x panels of tokens; a tile's weights are packed
//           once and multiplied with every panel of the chunk.
// backward: vocabulary blocks of tiles, in two phases.
//   Phase 1, a task per group of tiles: the gradient of their logits (from saved exponentials or
//   recomputed logits), d_bias, d_weight.
//   Phase 2, a task per block of d_hidden: += gradient . weights.
// Every output element belongs to one task and is summed in a fixed order.
#if defined(LOGITLESS_CHUNK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_CHUNK_INL_H
#undef LOGITLESS_CHUNK_INL_H
#else
#define LOGITLESS_CHUNK_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "core/parallel.h"
#include "kernels/cpu/head/few_tokens-inl.h"
#include "kernels/cpu/head/layout.h"
#include "kernels/cpu/head/simd_rows-inl.h"
#include "kernels/cpu/head/softmax-inl.h"
#include "kernels/cpu/head/weight_sink-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Named parts of a chunk's scratch.
template <class Engine>
class ChunkMemory {
 public:
  using Element = typename Engine::Element;
  static constexpr std::int64_t kPanel = Engine::kPanel;

  explicit ChunkMemory(const ChunkCommon& chunk)
      : layout(make_layout(Engine::kTraits, chunk.shape, *chunk.features, chunk.sizes)),
        panels(ceil_div(chunk.tokens, kPanel)),
        tokens(panels * kPanel),
        base_(chunk.scratch) {}

  Element* x_forward(std::int64_t panel) const {
    return at<Element>(layout.x_forward) + panel * kPanel * layout.dim_k;
  }
  Element* x_backward() const { return at<Element>(layout.x_backward); }
  Element* block_gradient() const { return at<Element>(layout.block_gradient); }
  Element* block_weight() const { return at<Element>(layout.block_weight); }
  float* d_hidden(std::int64_t token) const {
    return at<float>(layout.d_hidden) + token * layout.dim_n;
  }

  // [kVocabTile][kPanel] of one tile and panel.
  template <typename Stored>
  Stored* stored(std::int64_t tile, std::int64_t panel) const {
    return at<Stored>(layout.stored) +
           (tile * (layout.tokens / kPanel) + panel) * kVocabTile * kPanel;
  }
  float* stored_exponent(std::int64_t tile, std::int64_t panel) const {
    return at<float>(layout.stored_exponent) + tile * layout.tokens + panel * kPanel;
  }

  // State of one segment and panel.
  PanelState state(std::int64_t segment, std::int64_t panel, const ForwardChunk& chunk) const {
    const std::int64_t stride = layout.tokens;
    const std::size_t part_bytes =
        static_cast<std::size_t>(stride) *
        static_cast<std::size_t>(layout.state.floats * 4 + layout.state.doubles * 8);
    std::byte* from = base_ + layout.states + static_cast<std::size_t>(segment) * part_bytes;
    double* doubles = reinterpret_cast<double*>(from) + panel * kPanel;
    float* floats =
        reinterpret_cast<float*>(from + stride * layout.state.doubles * 8) + panel * kPanel;
    PanelState out{floats, floats + stride};
    if (chunk.argmax != nullptr) {
      out.best = floats + 2 * stride;
      out.best_index = floats + 3 * stride;
    }
    if (chunk.entropy_sum != nullptr) {
      out.entropy = doubles;
      doubles += stride;
    }
    if (chunk.weighted_sum != nullptr) out.weighted = doubles;
    if (chunk.wide != nullptr) {  // the last of the doubles
      const std::int64_t before = (layout.state.doubles - kExactSumDoubles) * stride;
      out.wide =
          reinterpret_cast<ExactSum*>(reinterpret_cast<double*>(from) + before) + panel * kPanel;
    }
    if (chunk.tile_mass) out.base = mass_base(segment, panel);
    return out;
  }
  // The last of a segment's floats, where there are tile masses.
  float* mass_base(std::int64_t segment, std::int64_t panel) const {
    const std::int64_t stride = layout.tokens;
    const StateFields& fields = layout.state;
    std::byte* from = base_ + layout.states +
                      static_cast<std::size_t>((segment * (fields.floats * 4 + fields.doubles * 8) +
                                                fields.doubles * 8 + (fields.floats - 1) * 4) *
                                               stride);
    return reinterpret_cast<float*>(from) + panel * kPanel;
  }
  std::uint16_t* tile_mass(std::int64_t tile, std::int64_t panel) const {
    return at<std::uint16_t>(layout.tile_mass) + tile * layout.tokens + panel * kPanel;
  }

  template <typename T>
  T* of_thread(int thread, std::size_t offset) const {
    return at<T>(layout.thread + layout.thread_bytes * static_cast<std::size_t>(thread) + offset);
  }

  const Layout layout;
  const std::int64_t panels;
  const std::int64_t tokens;  // full panels

  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  std::byte* base_;
};

inline LogitTransform TileTransform(const ChunkCommon& chunk, std::int64_t vocab_begin) {
  return {chunk.features->logit_scale, chunk.features->softcap,
          chunk.bias == nullptr ? nullptr : chunk.bias + vocab_begin,
          chunk.logit_weights == nullptr ? nullptr : chunk.logit_weights + vocab_begin};
}

// Iterates over the sparse entries of one tile, panel by panel.
class EntryCursor {
 public:
  EntryCursor(const SparseTargets& targets, std::int64_t tile)
      : at_(targets.entries + targets.tile_begin[tile]),
        end_(targets.entries + targets.tile_begin[tile + 1]) {}
  // Calls function(entry) for the entries of tokens below `token`, continuing from the last call.
  template <typename F>
  void until(std::int64_t token, F function) {
    for (; at_ != end_ && at_->token < token; ++at_) function(*at_);
  }

 private:
  const SparseEntry* at_;
  const SparseEntry* end_;
};

// Predicate of the tiles and panels that a forward computes: all.
struct KeepAll {
  static bool any(std::int64_t) { return true; }
  bool operator()(std::int64_t, std::int64_t) const { return true; }
};

template <class Engine, typename Stored, class Keep>
void ForwardPart(const ForwardChunk& chunk, const ChunkMemory<Engine>& memory, std::int64_t segment,
                 int thread, const Keep& keep) {
  [[maybe_unused]] const typename Engine::Session session;
  constexpr int kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  auto* weights = memory.template of_thread<typename Engine::Element>(thread, layout.weight_tile);
  float* z = memory.template of_thread<float>(thread, layout.logits);
  for (std::int64_t p = 0; p < memory.panels; ++p)
    ResetState(memory.state(segment, p, chunk), kPanel);

  const std::int64_t last_tile = std::min(layout.tiles, (segment + 1) * layout.tiles_per_part);
  for (std::int64_t tile = segment * layout.tiles_per_part; tile < last_tile; ++tile) {
    if (!keep.any(tile)) continue;
    const std::int64_t vocab_begin = tile * kVocabTile;
    const std::int64_t vocab_count = std::min(kVocabTile, chunk.shape.vocab - vocab_begin);
    const LogitTransform transform = TileTransform(chunk, vocab_begin);
    const bool store = chunk.store && vocab_begin < chunk.sizes.stored_vocab;
    const WeightTile<Engine> tile_weights(chunk, vocab_begin, vocab_count, layout.dim_k, weights);
    EntryCursor picks(chunk.targets, tile);
    EntryCursor zeros(chunk.targets, tile);
    for (std::int64_t p = 0; p < memory.panels; ++p) {
      if (!keep(tile, p)) continue;
      const std::int64_t tokens = std::min<std::int64_t>(kPanel, chunk.tokens - p * kPanel);
      tile_weights.logits(memory.x_forward(p), tokens, z);
      TransformBlock<kPanel>(transform, vocab_count, z);
      picks.until((p + 1) * kPanel, [&](const SparseEntry& e) {
        chunk.target_logit[e.slot] = z[(e.vocab_id - vocab_begin) * kPanel + e.token - p * kPanel];
      });
      Stored* stored = store ? memory.template stored<Stored>(tile, p) : nullptr;
      AbsorbBlock<kPanel, typename Engine::Bf16>(
          transform, vocab_begin, vocab_count, z, memory.state(segment, p, chunk), stored,
          store ? memory.stored_exponent(tile, p) : nullptr,
          chunk.tile_mass ? memory.tile_mass(tile, p) : nullptr);
      if (!store) continue;
      zeros.until((p + 1) * kPanel, [&](const SparseEntry& e) {
        stored[(e.vocab_id - vocab_begin) * kPanel + e.token - p * kPanel] = 0;
      });
    }
  }
}

// Merges the segments of one panel, in order.
template <class Engine>
void MergeSegments(const ForwardChunk& chunk, const ChunkMemory<Engine>& memory,
                   std::int64_t panel) {
  const std::int64_t first = panel * Engine::kPanel;
  const std::int64_t count = std::min<std::int64_t>(Engine::kPanel, chunk.tokens - first);
  for (std::int64_t t = 0; t < count; ++t) {
    float top = -INFINITY;
    for (std::int64_t s = 0; s < memory.layout.segments; ++s) {
      const PanelState state = memory.state(s, panel, chunk);
      if (state.sum[t] != 0.0f) top = std::max(top, state.exponent[t]);
    }
    if (top == -INFINITY) top = 0.0f;
    double sum = 0.0;
    double entropy = 0.0;
    double weighted = 0.0;
    float best = -INFINITY;
    std::int32_t best_index = 0;
    for (std::int64_t s = 0; s < memory.layout.segments; ++s) {
      const PanelState state = memory.state(s, panel, chunk);
      if (state.sum[t] != 0.0f) {
        const double factor = std::exp2(static_cast<double>(state.exponent[t]) - top);
        sum += state.sum[t] * factor;
        if (state.entropy != nullptr && factor != 0.0)
          entropy +=
              entropy_against(top, state.exponent[t], state.sum[t], state.entropy[t]) * factor;
      }
      if (state.weighted != nullptr) weighted += state.weighted[t];
      if (state.best != nullptr && state.best[t] > best) {
        best = state.best[t];
        std::memcpy(&best_index, state.best_index + t, sizeof(best_index));
      }
    }
    if (chunk.wide != nullptr) {
      ExactSum& wide = chunk.wide[first + t] = ExactSum();
      for (std::int64_t s = 0; s < memory.layout.segments; ++s)
        wide.add(memory.state(s, panel, chunk).wide[t]);
    }
    if (chunk.best != nullptr) chunk.best[first + t] = best;
    chunk.exponent[first + t] = top;
    chunk.sum[first + t] = static_cast<float>(sum);
    if (chunk.entropy_sum != nullptr) chunk.entropy_sum[first + t] = entropy / sum;
    if (chunk.weighted_sum != nullptr) chunk.weighted_sum[first + t] = weighted;
    if (chunk.argmax != nullptr) chunk.argmax[first + t] = best_index;
  }
}

template <class Engine>
void PackAllTokens(const ChunkCommon& chunk, const ChunkMemory<Engine>& memory) {
  parallel_for(chunk.threads, memory.panels, [&](std::int64_t p, int) {
    Engine::PackTokens(chunk.hidden, p * Engine::kPanel,
                       std::min<std::int64_t>(Engine::kPanel, chunk.tokens - p * Engine::kPanel),
                       chunk.shape.dim, memory.layout.dim_k, memory.x_forward(p));
  });
}

template <class Engine>
void RunForward(const ForwardChunk& chunk) {
  const ChunkMemory<Engine> memory(chunk);
  PackAllTokens(chunk, memory);
  parallel_for(chunk.threads, memory.layout.segments, [&](std::int64_t segment, int thread) {
    if (memory.layout.stored_element_bytes == 2) {
      ForwardPart<Engine, std::uint16_t>(chunk, memory, segment, thread, KeepAll());
    } else {
      ForwardPart<Engine, float>(chunk, memory, segment, thread, KeepAll());
    }
  });
  parallel_for(chunk.threads, memory.panels,
               [&](std::int64_t p, int) { MergeSegments(chunk, memory, p); });
}

// Computes the gradient of the logits of one tile, packed for the GEMMs, and its part of d_bias.
// `slot`: the tile's index in its group.
template <class Engine, typename Stored>
void LogitGradient(const BackwardChunk& chunk, const ChunkMemory<Engine>& memory, std::int64_t tile,
                   std::int64_t block_tile, std::int64_t slot,
                   const typename Engine::Gradient& gradient, int thread) {
  using Element = typename Engine::Element;
  constexpr int kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  const std::int64_t vocab_begin = tile * kVocabTile;
  const std::int64_t vocab_count = std::min(kVocabTile, chunk.shape.vocab - vocab_begin);
  const LogitTransform transform = TileTransform(chunk, vocab_begin);
  const bool stored = chunk.stored && vocab_begin < chunk.sizes.stored_vocab;
  auto* weights = memory.template of_thread<Element>(thread, layout.weight_tile);
  float* g = memory.template of_thread<float>(thread, layout.logits);
  std::optional<WeightTile<Engine>> tile_weights;
  if (!stored) tile_weights.emplace(chunk, vocab_begin, vocab_count, layout.dim_k, weights);
  EntryCursor zeros(chunk.targets, tile);
  for (std::int64_t p = 0; p < memory.panels; ++p) {
    const std::int64_t first = p * kPanel;
    const PanelCoefficients coefficients{chunk.exponent + first, chunk.alpha + first,
                                         chunk.beta == nullptr ? nullptr : chunk.beta + first,
                                         chunk.gamma == nullptr ? nullptr : chunk.gamma + first};
    if (stored) {
      GradientFromStored<kPanel>(transform, coefficients, vocab_count,
                                 memory.template stored<Stored>(tile, p),
                                 memory.stored_exponent(tile, p), g);
    } else {
      const std::int64_t tokens = std::min<std::int64_t>(kPanel, chunk.tokens - first);
      tile_weights->logits(memory.x_forward(p), tokens, g);
      TransformBlock<kPanel>(transform, vocab_count, g);
      GradientFromLogits<kPanel>(transform, coefficients, vocab_count, g);
    }
    std::memset(g + vocab_count * kPanel, 0,
                static_cast<std::size_t>((kVocabTile - vocab_count) * kPanel) * sizeof(float));
    zeros.until(first + kPanel, [&](const SparseEntry& e) {
      g[(e.vocab_id - vocab_begin) * kPanel + e.token - first] = 0.0f;
    });
    if (chunk.d_bias != nullptr) SumTokens<kPanel>(vocab_count, g, chunk.d_bias + vocab_begin);
    Engine::EmitGradient(gradient, p, block_tile, slot, g);
  }
}

// d_weight of rows [`vocab_begin`, + `vocab_count`) of a group, whose targets are among
// [entries, entries_end).
template <class Engine>
void WeightGradientRows(const BackwardChunk& chunk, const ChunkMemory<Engine>& memory,
                        const typename Engine::Gradient& gradient, std::int64_t vocab_begin,
                        std::int64_t vocab_count, const SparseEntry* entries,
                        const SparseEntry* entries_end, float* HWY_RESTRICT c) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  for (std::int64_t column = 0; column < chunk.shape.dim; column += layout.column_block) {
    const std::int64_t columns = std::min(layout.column_block, chunk.shape.dim - column);
    LoadWeightGradient(chunk.d_weight, chunk.shape.dim, vocab_begin, vocab_count,
                       round_up(vocab_count, Engine::kRows), column, columns, c,
                       layout.column_block);
    // Skips the tokens that pad a panel: with few tokens they would be much of the work.
    Engine::WeightGradient(gradient, vocab_count, memory.x_backward(), chunk.tokens, layout.tokens,
                           column / kPanel, ceil_div(columns, kPanel), c, layout.column_block);
    for (const SparseEntry* e = entries; e != entries_end; ++e) {
      const std::int64_t row = e->vocab_id - vocab_begin;
      if (row < 0 || row >= vocab_count) continue;
      AddRow(chunk.hidden, e->token, column, columns, chunk.coefficient[e->slot],
             c + row * layout.column_block);
    }
    StoreWeightGradient(chunk.d_weight, chunk.shape.dim, vocab_begin, vocab_count, column, columns,
                        c, layout.column_block);
  }
}

// Phase 1 for the tiles [tile, + tiles), at most Engine::kTileGroup: the gradients of their logits,
// d_bias and d_weight.
template <class Engine, typename Stored>
void BackwardGroup(const BackwardChunk& chunk, const ChunkMemory<Engine>& memory, std::int64_t tile,
                   std::int64_t tiles, std::int64_t block_tile, int thread) {
  [[maybe_unused]] const typename Engine::Session session;
  const Layout& layout = memory.layout;
  const std::int64_t vocab_begin = tile * kVocabTile;
  const std::int64_t vocab_count = std::min(tiles * kVocabTile, chunk.shape.vocab - vocab_begin);
  const auto gradient = Engine::TileGradient(
      memory.block_gradient(), block_tile,
      memory.template of_thread<typename Engine::Element>(thread, layout.gradient_tile), layout);
  for (std::int64_t t = 0; t < tiles; ++t)
    LogitGradient<Engine, Stored>(chunk, memory, tile + t, block_tile + t, t, gradient, thread);

  const SparseEntry* entries = chunk.targets.entries + chunk.targets.tile_begin[tile];
  const SparseEntry* entries_end = chunk.targets.entries + chunk.targets.tile_begin[tile + tiles];
  if (chunk.d_bias != nullptr) {
    for (const SparseEntry* e = entries; e != entries_end; ++e)
      chunk.d_bias[e->vocab_id] += chunk.coefficient[e->slot];
  }
  if (chunk.d_weight.data != nullptr) {
    float* c = memory.template of_thread<float>(thread, layout.d_weight);
    // Few tokens take so little time for a row that its sums must stay in L1.
    const std::int64_t step = has_few<Engine>(chunk) ? Engine::kRows : vocab_count;
    for (std::int64_t row = 0; row < vocab_count; row += step) {
      auto rows = gradient;
      if constexpr (Engine::kFewTokens > 0) rows.vocab_block += row * rows.stride;
      WeightGradientRows(chunk, memory, rows, vocab_begin + row, std::min(step, vocab_count - row),
                         entries, entries_end, c);
    }
  }
  if (chunk.d_hidden.data != nullptr && !has_few<Engine>(chunk)) {
    Engine::PackRows(chunk.weight, vocab_begin, vocab_count, tiles * kVocabTile, chunk.shape.dim,
                     block_tile * kVocabTile, chunk.sizes.block_vocab, memory.block_weight());
  }
}

// Adds coefficient * weight of a token's targets.
inline void AddTargets(const BackwardChunk& chunk, std::int64_t token, float* HWY_RESTRICT row) {
  const std::int64_t per_token = chunk.features->targets_per_token;
  for (std::int64_t slot = token * per_token; slot < (token + 1) * per_token; ++slot) {
    const std::int32_t vocab_id = chunk.targets.vocab_ids[slot];
    if (vocab_id >= 0)
      AddRow(chunk.weight, vocab_id, 0, chunk.shape.dim, chunk.coefficient[slot], row);
  }
}

// Stores d_hidden of one token to the caller's row.
inline void StoreHidden(const BackwardChunk& chunk, std::int64_t token, const float* row) {
  const HiddenGradientSink& to = chunk.d_hidden;
  StoreRow(to.data, to.dtype, to.rows[token] * to.row_stride, to.col_stride, to.accumulate,
           chunk.shape.dim, row);
}

// Packs hidden states for d_weight, and clears the sums of d_hidden.
template <class Engine>
void PackForBackward(const BackwardChunk& chunk, const ChunkMemory<Engine>& memory) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const Layout& layout = memory.layout;
  parallel_for(chunk.threads, memory.panels, [&](std::int64_t p, int) {
    if (chunk.d_weight.data != nullptr) {
      Engine::PackRows(chunk.hidden, p * kPanel, std::min(kPanel, chunk.tokens - p * kPanel),
                       kPanel, chunk.shape.dim, p * kPanel, layout.tokens, memory.x_backward());
    }
    if (chunk.d_hidden.data != nullptr) {
      std::memset(memory.d_hidden(p * kPanel), 0,
                  static_cast<std::size_t>(kPanel * layout.dim_n) * sizeof(float));
    }
  });
}

// d_hidden += gradient . weights over a vocabulary block of `tiles` tiles, for all tokens.
template <class Engine>
void AddBlockToHidden(const BackwardChunk& chunk, const ChunkMemory<Engine>& memory,
                      std::int64_t tiles) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  constexpr std::int64_t kTokenBlock =
      std::max<std::int64_t>(1, Engine::kTokenBlock / kPanel) * kPanel;
  const Layout& layout = memory.layout;
  const std::int64_t token_blocks = ceil_div(memory.tokens, kTokenBlock);
  const std::int64_t column_blocks = ceil_div(layout.dim_n, layout.column_block);
  parallel_for(chunk.threads, token_blocks * column_blocks, [&](std::int64_t task, int) {
    [[maybe_unused]] const typename Engine::Session session;
    const std::int64_t token = task / column_blocks * kTokenBlock;
    const std::int64_t column = task % column_blocks * layout.column_block;
    Engine::HiddenGradient(memory.block_gradient(), layout.gradient_stride, token,
                           std::min(kTokenBlock, chunk.tokens - token), chunk.sizes.block_vocab,
                           memory.block_weight(), tiles * kVocabTile, chunk.sizes.block_vocab,
                           column / kPanel,
                           std::min(layout.column_block, layout.dim_n - column) / kPanel,
                           memory.d_hidden(token) + column, layout.dim_n);
  });
}

// The same for a few tokens, from the weights in place.
template <class Engine>
void AddRowsToHidden(const BackwardChunk& chunk, const ChunkMemory<Engine>& memory,
                     std::int64_t vocab_begin, std::int64_t most) {
  constexpr std::int64_t kColumns = 64;  // threads divide the columns at multiples of these
  const std::int64_t dim = chunk.shape.dim, block = memory.layout.column_block;
  const std::int64_t columns =
      std::min(block, round_up(ceil_div(dim, std::min(chunk.threads, 64)), kColumns));
  const std::int64_t count = std::min(most, chunk.shape.vocab - vocab_begin);
  parallel_for(chunk.threads, ceil_div(dim, columns), [&](std::int64_t task, int) {
    AddRows(chunk.weight, vocab_begin, count, task * columns,
            std::min(columns, dim - task * columns), memory.block_gradient(),
            memory.layout.gradient_stride, chunk.tokens, memory.d_hidden(0) + task * columns,
            memory.layout.dim_n);
  });
}

template <class Engine>
void RunBackward(const BackwardChunk& chunk) {
  constexpr std::int64_t kPanel = Engine::kPanel;
  const ChunkMemory<Engine> memory(chunk);
  const Layout& layout = memory.layout;
  const bool d_hidden = chunk.d_hidden.data != nullptr;
  if (chunk.apart) PackAllTokens(chunk, memory);
  PackForBackward(chunk, memory);

  const std::int64_t block_tiles = chunk.sizes.block_vocab / kVocabTile;
  for (std::int64_t first = 0; first < layout.tiles; first += block_tiles) {
    const std::int64_t tiles = std::min(block_tiles, layout.tiles - first);
    parallel_for(
        chunk.threads, ceil_div(tiles, Engine::kTileGroup), [&](std::int64_t group, int thread) {
          const std::int64_t tile = group * Engine::kTileGroup;
          const std::int64_t count = std::min(Engine::kTileGroup, tiles - tile);
          if (layout.stored_element_bytes == 2) {
            BackwardGroup<Engine, std::uint16_t>(chunk, memory, first + tile, count, tile, thread);
          } else {
            BackwardGroup<Engine, float>(chunk, memory, first + tile, count, tile, thread);
          }
        });
    if (!d_hidden) continue;
    if constexpr (Engine::kFewTokens > 0) {
      if (has_few<Engine>(chunk)) {
        AddRowsToHidden(chunk, memory, first * kVocabTile, tiles * kVocabTile);
        continue;
      }
    }
    AddBlockToHidden(chunk, memory, tiles);
  }
  if (!d_hidden) return;
  parallel_for(chunk.threads, memory.panels, [&](std::int64_t p, int) {
    const std::int64_t end = std::min<std::int64_t>((p + 1) * kPanel, chunk.tokens);
    for (std::int64_t t = p * kPanel; t < end; ++t) {
      AddTargets(chunk, t, memory.d_hidden(t));
      StoreHidden(chunk, t, memory.d_hidden(t));
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

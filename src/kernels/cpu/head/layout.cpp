#include "kernels/cpu/head/layout.h"

#include <algorithm>
#include <bit>

#include "math/far_sums.h"

namespace logitless::cpu {
namespace {

// Bump allocator of 64-byte aligned ranges.
class Stack {
 public:
  std::size_t take(std::int64_t bytes) {
    const std::size_t at = top_;
    top_ += static_cast<std::size_t>(round_up(bytes, 64));
    return at;
  }
  std::size_t top() const { return top_; }

 private:
  std::size_t top_ = 0;
};

}  // namespace

Layout make_layout(const EngineTraits& engine, const HeadShape& shape, const HeadFeatures& features,
                   const ChunkSizes& sizes) {
  const bool backward = !sizes.forward_only;
  const bool d_weight = backward && features.d_weight;
  const bool d_hidden = backward && features.d_hidden;
  Layout out;
  out.tokens = round_up(sizes.tokens, engine.token_panel);
  out.dim_k = round_up(shape.dim, engine.k_align);
  out.dim_n = round_up(shape.dim, engine.token_panel);
  out.tiles = ceil_div(shape.vocab, kVocabTile);
  out.tiles_per_part = std::min(ceil_div(out.tiles, kSegments), kMaxPartTiles);
  // The far field needs a whole number of segments in each group of kVocabTile tiles.
  if (sizes.far) {
    out.tiles_per_part = std::min(
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(out.tiles_per_part))),
        kVocabTile);
  }
  out.segments = ceil_div(out.tiles, out.tiles_per_part);
  out.column_block = std::min(kColumnBlock / engine.token_panel * engine.token_panel, out.dim_n);
  out.stored_element_bytes = static_cast<std::int64_t>(stored_element_bytes(shape.dtype));
  // Not a power of two, so that rows of a column do not share a cache set.
  out.gradient_stride = out.tokens + 16;
  out.block_vocab = sizes.block_vocab;
  out.d_hidden_wanted = d_hidden;
  out.d_weight_wanted = d_weight;
  out.state.floats = (features.argmax ? 4 : 2) + (sizes.far ? 1 : 0);
  out.state.doubles = (features.entropy ? 1 : 0) + (features.label_smoothing ? 1 : 0) +
                      (features.vocab_ranks > 0 ? kExactSumDoubles : 0);

  const std::int64_t e = engine.element_bytes;
  const std::int64_t stored_tiles = backward ? ceil_div(sizes.stored_vocab, kVocabTile) : 0;
  const std::int64_t vocab_block = backward ? sizes.block_vocab : 0;

  Stack shared;
  out.x_forward = shared.take(out.tokens * out.dim_k * e);
  out.x_backward = shared.take(d_weight ? out.tokens * out.dim_n * e : 0);
  out.states =
      shared.take(out.segments * out.tokens * (out.state.floats * 4 + out.state.doubles * 8));
  out.stored = shared.take(stored_tiles * kVocabTile * out.tokens * out.stored_element_bytes);
  out.stored_exponent = shared.take(stored_tiles * out.tokens * 4);
  // The far field pads tokens to full blocks, since pairs of a tile and a block are stored
  // separately.
  const std::int64_t block = far_block_panels(engine.token_panel) * engine.token_panel;
  const std::int64_t gradient_tokens =
      sizes.far ? std::max(round_up(out.tokens, block), out.gradient_stride) : out.gradient_stride;
  out.block_gradient =
      shared.take(d_hidden || !engine.gradient_twice ? vocab_block * gradient_tokens * e : 0);
  out.block_weight = shared.take(d_hidden ? vocab_block * out.dim_n * e : 0);
  out.d_hidden = shared.take(d_hidden ? out.tokens * out.dim_n * 4 : 0);
  if (sizes.far) {
    const std::int64_t blocks = ceil_div(out.tokens, block);
    const std::int64_t full_tiles = round_up(out.tiles, kVocabTile);
    out.tile_mass = shared.take(out.tiles * out.tokens * 2);
    out.threshold = shared.take(out.segments * out.tokens * 2);
    out.selected = shared.take(out.tiles * blocks);
    out.pair_begin = shared.take((vocab_block / kVocabTile + 1) * 4);
    constexpr auto kSampled = static_cast<std::int64_t>(sizeof(FarSampled));
    out.of_sample = shared.take(sizes.far_forward ? vocab_block / kVocabTile * kSampled : 0);
    out.tile_gradient = shared.take(d_weight ? full_tiles * out.dim_n * 4 : 0);
    out.tile_sum = shared.take(full_tiles * 4);
    out.squares = shared.take(sizes.far_forward ? out.tokens * out.dim_k * e : 0);
    out.estimate =
        shared.take(sizes.far_forward ? full_tiles / kVocabTile * 2 * out.tokens * 4 : 0);
    out.gamma_hidden = shared.take(d_weight && features.label_smoothing ? shape.dim * 4 : 0);
  }
  out.thread = shared.top();

  Stack own;
  out.weight_tile = own.take(kVocabTile * (out.dim_k + 16) * e);
  out.logits = own.take(kVocabTile * engine.token_panel * 4);
  out.gradient_tile = own.take(
      d_weight && engine.gradient_twice ? engine.tile_group * kVocabTile * out.tokens * e : 0);
  out.variance_tile = own.take(sizes.far_forward ? kVocabTile * (out.dim_k + 16) * e : 0);
  out.forms = own.take(sizes.far_forward ? kVocabTile * engine.token_panel * 4 : 0);
  out.d_weight = own.take(d_weight ? engine.tile_group * kVocabTile * out.column_block * 4 : 0);
  out.thread_bytes = own.top();
  // No parallel region has more tasks that use a thread's part, however many threads there are.
  std::int64_t tasks = sizes.forward_only ? out.segments : out.tiles;
  if (sizes.far)
    tasks = std::max({tasks, out.tokens / engine.token_panel, ceil_div(shape.dim, kVocabTile)});
  const std::int64_t parts = std::min<std::int64_t>(sizes.threads, tasks);
  out.total = out.thread + out.thread_bytes * static_cast<std::size_t>(parts);
  return out;
}

}  // namespace logitless::cpu

// Scratch layout of the CPU kernels: one pure function from sizes to offsets, for the planner and
// the kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu_head.h"

namespace logitless::cpu {

// Properties of an engine (a way to multiply tiles) that determine the layout.
struct EngineTraits {
  std::int64_t element_bytes;  // of packed operands and of the gradient of the logits
  std::int64_t token_panel;    // tokens (columns) of a packed panel
  std::int64_t k_align;        // the contracted dimension is padded to this
  bool gradient_twice;         // the logit gradient is packed separately for d_hidden and d_weight
  std::int64_t tile_group;     // vocabulary tiles whose d_weight one task computes together
};

// Columns of d_weight and d_hidden computed at a time, rounded down to full panels.
inline constexpr std::int64_t kColumnBlock = 512;
// Segments of the vocabulary, whose states are merged in order and in double. There are more where
// a segment's fp32 sum would have too many terms for an accuracy of 1e-6.
inline constexpr std::int64_t kSegments = 64;
inline constexpr std::int64_t kMaxPartTiles = 512;

// Panels of a block of tokens that share a list of selected tiles: about 128 tokens, in full
// panels.
constexpr std::int64_t far_block_panels(std::int64_t token_panel) {
  return std::max<std::int64_t>(1, (128 + token_panel / 2) / token_panel);
}

inline constexpr int kExactSumDoubles = sizeof(ExactSum) / sizeof(double);

// Per-token state of one segment: arrays of floats, and of doubles for the requested sums.
struct StateFields {
  int floats = 2;   // exponent, sum; with argmax: best, index; with tile masses: base
  int doubles = 0;  // entropy sum, weighted sum, a ExactSum
};

struct Layout {
  std::int64_t tokens = 0;  // padded to full panels
  std::int64_t dim_k = 0;   // dim padded as a contracted dimension
  std::int64_t dim_n = 0;   // dim padded to full panels
  std::int64_t tiles = 0;   // of the vocabulary
  std::int64_t segments = 0;
  std::int64_t tiles_per_part = 0;
  std::int64_t column_block = 0;
  std::int64_t stored_element_bytes = 0;
  std::int64_t gradient_stride = 0;  // elements between rows of the vocabulary block's gradient
  std::int64_t block_vocab = 0;
  bool d_hidden_wanted = false;
  bool d_weight_wanted = false;
  StateFields state;

  // Byte offsets in scratch. Shared by all threads:
  std::size_t x_forward = 0;        // packed hidden, contracted along dim
  std::size_t x_backward = 0;       // packed hidden, contracted along tokens
  std::size_t states = 0;           // [segments][fields][tokens]
  std::size_t stored = 0;           // [stored tiles][panels][kVocabTile][panel]
  std::size_t stored_exponent = 0;  // [stored tiles][tokens] f32
  std::size_t block_gradient = 0;
  std::size_t block_weight = 0;
  std::size_t d_hidden = 0;  // [tokens][dim_n] f32
  // far field:
  std::size_t tile_mass = 0;      // u16 [tiles][tokens]
  std::size_t threshold = 0;      // u16 [segments][tokens]
  std::size_t selected = 0;       // u8 [tiles][blocks]
  std::size_t pair_begin = 0;     // i32 [tiles of the vocabulary block + 1]
  std::size_t of_sample = 0;      // FarSampled [tiles of the vocabulary block]
  std::size_t tile_gradient = 0;  // [tiles, padded to kVocabTile][dim_n] f32
  std::size_t tile_sum = 0;       // f32 [tiles, padded to kVocabTile]
  std::size_t gamma_hidden = 0;   // f32 [dim]: sum_i gamma_i x_i
  std::size_t squares = 0;        // packed like x_forward: (x . axis)^2
  std::size_t estimate = 0;       // f32 [groups of kVocabTile tiles][exponent, sum][tokens]
  // per thread:
  std::size_t thread = 0;
  std::size_t thread_bytes = 0;
  std::size_t weight_tile = 0;  // offsets inside a thread's part
  std::size_t logits = 0;       // [kVocabTile][panel] f32
  std::size_t gradient_tile = 0;
  std::size_t variance_tile = 0;  // far-field forward: like weight_tile, like logits
  std::size_t forms = 0;
  std::size_t d_weight = 0;  // [kVocabTile][column_block] f32
  std::size_t total = 0;
};

Layout make_layout(const EngineTraits& engine, const HeadShape& shape, const HeadFeatures& features,
                   const ChunkSizes& sizes);

// 16-bit for 16-bit inputs, where rounding exp(z) by 2^-9 is within the contract; fp32 for fp32.
constexpr std::size_t stored_element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace logitless::cpu

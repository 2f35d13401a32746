// Separate computation of d_weight, one vocabulary block at a time over all chunks, from saved data
// of the tokens. Only the fp32 sums of that block are in memory. Sums have the same order, and so
// the same bits, as those of the joint computation.
#include <algorithm>

#include "head/cpu/engine.h"
#include "math/lse_state.h"

namespace logitless::cpu {

void Engine::keep_coefficients(const ForwardChunk& chunk, std::int64_t first) const {
  const KeptLayout& kept = layout_.kept;
  const std::int64_t per_token = plan_.features.targets_per_token;
  const auto keep = [&](std::size_t from, std::size_t to, std::int64_t each) {
    std::copy_n(at<std::int32_t>(from), chunk.tokens * each, at<std::int32_t>(to) + first * each);
  };
  keep(layout_.exponent, kept.exponent, 1);
  keep(layout_.linear, kept.linear, 1);
  if (plan_.features.entropy_gradient) keep(layout_.slope, kept.slope, 1);
  if (plan_.features.label_smoothing) keep(layout_.flat, kept.flat, 1);
  keep(layout_.coefficient, kept.coefficient, per_token);
  keep(layout_.words, kept.words, per_token);
}

void Engine::run_weight_pass() const {
  const std::int64_t all = words_.rows();
  for (std::int64_t word = 0; word < all; word += sizes_.weight_words) {
    const std::int64_t words = std::min(sizes_.weight_words, all - word);
    for (std::int64_t first = 0; first < valid_; first += step_)
      weight_of_words(word, words, chunk_tokens(first), first == 0, first + step_ >= valid_);
  }
}

void Engine::weight_of_words(std::int64_t first_word, std::int64_t words, const ChunkTokens& tokens,
                             bool first_chunk, bool last_chunk) const {
  const KeptLayout& kept = layout_.kept;
  const std::int64_t first = tokens.first, count = tokens.count;
  const std::int64_t per_token = plan_.features.targets_per_token;
  BackwardChunk chunk;
  set_common(chunk, tokens);
  chunk.shape.vocab = words;
  const auto element = static_cast<std::int64_t>(size_of(chunk.weight.dtype));
  chunk.weight.data = static_cast<const std::byte*>(chunk.weight.data) +
                      first_word * chunk.weight.row_stride * element;
  if (chunk.bias != nullptr) chunk.bias += first_word;
  if (chunk.omega != nullptr) chunk.omega += first_word;
  auto* const places = at<std::int32_t>(kept.places);
  chunk.targets.words = places;
  sort_targets({at<std::int32_t>(kept.words) + first * per_token, places,
                at<SparseEntry>(layout_.entries), at<std::int32_t>(layout_.tile_begin)},
               count, plan_.features.targets_per_token, words,
               WordPlaces(words_.part(first_word, words)));
  // Kernels read full panels, so the padding after the last token is 0, including its exponentials.
  const std::int64_t end = std::min(round_up(count, 64) + 64, sizes_.tokens + 64);
  const auto part = [&](std::size_t from, std::size_t to, double rest = 0.0) {
    float* const values = at<float>(to);
    std::copy_n(at<float>(from) + first, count, values);
    std::fill(values + count, values + end, static_cast<float>(rest));
    return values;
  };
  chunk.exponent = part(kept.exponent, layout_.exponent, kMostExponent);
  chunk.linear = part(kept.linear, layout_.linear);
  if (plan_.features.entropy_gradient) chunk.slope = part(kept.slope, layout_.slope);
  if (plan_.features.label_smoothing) chunk.flat = part(kept.flat, layout_.flat);
  chunk.coefficient = at<float>(kept.coefficient) + first * per_token;
  chunk.apart = true;
  chunk.d_weight = weight_sink(first_chunk, last_chunk);
  chunk.d_weight.data = static_cast<std::byte*>(chunk.d_weight.data) +
                        first_word * chunk.d_weight.row_stride *
                            static_cast<std::int64_t>(size_of(chunk.d_weight.dtype));
  kernel_.backward(chunk);
}

}  // namespace logitless::cpu

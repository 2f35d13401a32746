// Separate computation of d_weight, one vocabulary block at a time over all chunks, from saved data
// of the tokens. Only the fp32 sums of that block are in memory. Sums have the same order, and so
// the same bits, as those of the joint computation.
#include <algorithm>

#include "head/cpu/engine.h"
#include "math/lse_state.h"

namespace logitless::cpu {

void Engine::keep_coefficients(const ForwardChunk& chunk, std::int64_t first) const {
  const SavedLayout& saved = run_.layout.saved;
  const std::int64_t per_token = run_.plan.features.targets_per_token;
  const auto keep = [&](std::size_t from, std::size_t to, std::int64_t each) {
    std::copy_n(run_.at<std::int32_t>(from), chunk.tokens * each,
                run_.at<std::int32_t>(to) + first * each);
  };
  keep(run_.layout.exponent, saved.exponent, 1);
  keep(run_.layout.alpha, saved.alpha, 1);
  if (run_.plan.features.entropy_gradient) keep(run_.layout.beta, saved.beta, 1);
  if (run_.plan.features.label_smoothing) keep(run_.layout.gamma, saved.gamma, 1);
  keep(run_.layout.coefficient, saved.coefficient, per_token);
  keep(run_.layout.vocab_ids, saved.vocab_ids, per_token);
}

void Engine::run_weight_pass() const {
  const std::int64_t all = run_.vocab.rows();
  for (std::int64_t vocab_id = 0; vocab_id < all; vocab_id += run_.sizes.weight_vocab) {
    const std::int64_t vocab_count = std::min(run_.sizes.weight_vocab, all - vocab_id);
    for (std::int64_t first = 0; first < run_.valid; first += step_)
      weight_of_vocab(vocab_id, vocab_count, chunk_tokens(first), first == 0,
                      first + step_ >= run_.valid);
  }
}

void Engine::weight_of_vocab(std::int64_t vocab_begin, std::int64_t vocab_count,
                             const ChunkTokens& tokens, bool first_chunk, bool last_chunk) const {
  const SavedLayout& saved = run_.layout.saved;
  const std::int64_t first = tokens.first, count = tokens.count;
  const std::int64_t per_token = run_.plan.features.targets_per_token;
  BackwardChunk chunk;
  set_common(chunk, tokens);
  chunk.shape.vocab = vocab_count;
  const auto element = static_cast<std::int64_t>(size_of(chunk.weight.dtype));
  chunk.weight.data = static_cast<const std::byte*>(chunk.weight.data) +
                      vocab_begin * chunk.weight.row_stride * element;
  if (chunk.bias != nullptr) chunk.bias += vocab_begin;
  if (chunk.logit_weights != nullptr) chunk.logit_weights += vocab_begin;
  auto* const places = run_.at<std::int32_t>(saved.places);
  chunk.targets.vocab_ids = places;
  sort_targets(
      {run_.at<std::int32_t>(saved.vocab_ids) + first * per_token, places,
       run_.at<SparseEntry>(run_.layout.entries), run_.at<std::int32_t>(run_.layout.tile_begin)},
      count, run_.plan.features.targets_per_token, vocab_count,
      LocalRows(run_.vocab.part(vocab_begin, vocab_count)));
  // Kernels read full panels, so the padding after the last token is 0, including its exponentials.
  const std::int64_t end = std::min(round_up(count, 64) + 64, run_.sizes.tokens + 64);
  const auto part = [&](std::size_t from, std::size_t to, double rest = 0.0) {
    float* const values = run_.at<float>(to);
    std::copy_n(run_.at<float>(from) + first, count, values);
    std::fill(values + count, values + end, static_cast<float>(rest));
    return values;
  };
  chunk.exponent = part(saved.exponent, run_.layout.exponent, kMostExponent);
  chunk.alpha = part(saved.alpha, run_.layout.alpha);
  if (run_.plan.features.entropy_gradient) chunk.beta = part(saved.beta, run_.layout.beta);
  if (run_.plan.features.label_smoothing) chunk.gamma = part(saved.gamma, run_.layout.gamma);
  chunk.coefficient = run_.at<float>(saved.coefficient) + first * per_token;
  chunk.apart = true;
  chunk.d_weight = weight_sink(first_chunk, last_chunk);
  chunk.d_weight.data = static_cast<std::byte*>(chunk.d_weight.data) +
                        vocab_begin * chunk.d_weight.row_stride *
                            static_cast<std::int64_t>(size_of(chunk.d_weight.dtype));
  run_.kernel.backward(chunk);
}

}  // namespace logitless::cpu

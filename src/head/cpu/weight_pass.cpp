// Separate computation of d_weight, one vocabulary block at a time over all chunks, from saved data
// of the tokens. Only the fp32 sums of that block are in memory. Sums have the same order, and so
// the same bits, as those of the joint computation.
#include <algorithm>

#include "head/cpu/run.h"
#include "math/lse_state.h"

namespace logitless::cpu {

void keep_coefficients(const Run& run, const ForwardChunk& chunk, std::int64_t first) {
  const SavedLayout& saved = run.layout.saved;
  const std::int64_t per_token = run.plan.features.targets_per_token;
  const auto keep = [&](std::size_t from, std::size_t to, std::int64_t each) {
    std::copy_n(run.at<std::int32_t>(from), chunk.tokens * each,
                run.at<std::int32_t>(to) + first * each);
  };
  keep(run.layout.exponent, saved.exponent, 1);
  keep(run.layout.alpha, saved.alpha, 1);
  if (run.plan.features.entropy_gradient) keep(run.layout.beta, saved.beta, 1);
  if (run.plan.features.label_smoothing) keep(run.layout.gamma, saved.gamma, 1);
  keep(run.layout.coefficient, saved.coefficient, per_token);
  keep(run.layout.vocab_ids, saved.vocab_ids, per_token);
}

namespace {

void weight_of_vocab(const Run& run, std::int64_t vocab_begin, std::int64_t vocab_count,
                     const ChunkTokens& tokens, bool first_chunk, bool last_chunk) {
  const SavedLayout& saved = run.layout.saved;
  const std::int64_t first = tokens.first, count = tokens.count;
  const std::int64_t per_token = run.plan.features.targets_per_token;
  BackwardChunk chunk;
  run.set_common(chunk, tokens);
  chunk.shape.vocab = vocab_count;
  const auto element = static_cast<std::int64_t>(size_of(chunk.weight.dtype));
  chunk.weight.data = static_cast<const std::byte*>(chunk.weight.data) +
                      vocab_begin * chunk.weight.row_stride * element;
  if (chunk.bias != nullptr) chunk.bias += vocab_begin;
  if (chunk.logit_weights != nullptr) chunk.logit_weights += vocab_begin;
  auto* const places = run.at<std::int32_t>(saved.places);
  chunk.targets.vocab_ids = places;
  sort_targets(
      {run.at<std::int32_t>(saved.vocab_ids) + first * per_token, places,
       run.at<SparseEntry>(run.layout.entries), run.at<std::int32_t>(run.layout.tile_begin)},
      count, run.plan.features.targets_per_token, vocab_count,
      LocalRows(run.vocab.part(vocab_begin, vocab_count)));
  // Kernels read full panels, so the padding after the last token is 0, including its exponentials.
  const std::int64_t end = std::min(round_up(count, 64) + 64, run.sizes.tokens + 64);
  const auto part = [&](std::size_t from, std::size_t to, double rest = 0.0) {
    float* const values = run.at<float>(to);
    std::copy_n(run.at<float>(from) + first, count, values);
    std::fill(values + count, values + end, static_cast<float>(rest));
    return values;
  };
  chunk.exponent = part(saved.exponent, run.layout.exponent, kMostExponent);
  chunk.alpha = part(saved.alpha, run.layout.alpha);
  if (run.plan.features.entropy_gradient) chunk.beta = part(saved.beta, run.layout.beta);
  if (run.plan.features.label_smoothing) chunk.gamma = part(saved.gamma, run.layout.gamma);
  chunk.coefficient = run.at<float>(saved.coefficient) + first * per_token;
  chunk.apart = true;
  chunk.d_weight = run.weight_sink(first_chunk, last_chunk);
  chunk.d_weight.data = static_cast<std::byte*>(chunk.d_weight.data) +
                        vocab_begin * chunk.d_weight.row_stride *
                            static_cast<std::int64_t>(size_of(chunk.d_weight.dtype));
  run.kernel.backward(chunk);
}

}  // namespace

void run_weight_pass(const Run& run, std::int64_t step) {
  const std::int64_t all = run.vocab.rows();
  for (std::int64_t vocab_id = 0; vocab_id < all; vocab_id += run.sizes.weight_vocab) {
    const std::int64_t vocab_count = std::min(run.sizes.weight_vocab, all - vocab_id);
    for (std::int64_t first = 0; first < run.valid; first += step)
      weight_of_vocab(run, vocab_id, vocab_count, run.chunk_tokens(first, step), first == 0,
                      first + step >= run.valid);
  }
}

}  // namespace logitless::cpu

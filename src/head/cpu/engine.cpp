#include "head/cpu/engine.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <span>

namespace logitless::cpu {

Engine::Engine(const HeadCall& call, const ChosenRows& chosen) : run_(call, chosen) {}

std::int64_t Engine::count_tokens() {
  all_valid_ = run_.valid;
  if (!run_.call.shard.tokens_sharded) return run_.valid;
  const std::span<const std::int64_t> counts = ranks_.gather_counts();
  all_valid_ = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  return *std::max_element(counts.begin(), counts.end());
}

void Engine::run(TokenFunction function) {
  const std::int64_t most = count_tokens();
  if (run_.gathered()) return run_weight_gathered(run_, all_valid_, function);
  const bool backward_wanted = run_.wants_gradients();
  if (backward_wanted && !run_.chosen.chosen()) run_.clear_ignored(all_valid_);
  if (backward_wanted && run_.plan.features.d_bias) {
    std::fill_n(run_.at<float>(run_.layout.d_bias), run_.call.shape.vocab, 0.0f);
  }
  if (run_.far()) far_.begin(all_valid_);
  // Chunks have equal sizes: a short last one would waste the fixed work of a
  // chunk.
  const std::int64_t capacity = run_.call.shard.tokens_sharded
                                    ? run_.sizes.tokens / run_.call.shard.ranks()
                                    : run_.sizes.tokens;
  const std::int64_t chunks = ceil_div(std::max<std::int64_t>(most, 1), capacity);
  const std::int64_t step = ceil_div(most, chunks);
  for (std::int64_t first = 0; first < most; first += step)
    run_chunk(run_.chunk_tokens(first, step), first == 0, first + step >= most, function);
  if (backward_wanted && run_.plan.features.d_bias) finish_bias();
  if (run_.weight_apart()) run_weight_pass(run_, step);
}

void Engine::run_chunk(const ChunkTokens& tokens, bool first_chunk, bool last_chunk,
                       TokenFunction function) {
  const bool backward_wanted = run_.wants_gradients();
  ForwardChunk chunk;
  run_.set_common(chunk, tokens);
  auto* vocab_ids = run_.at<std::int32_t>(run_.layout.vocab_ids);
  if (run_.sharded()) {
    ranks_.gather_tokens(tokens);
    if (run_.far() && run_.exchanges_tokens()) far_.sort_by_targets(tokens);
    ranks_.copy_targets(tokens, vocab_ids);
  } else {
    read_targets(run_.targets, run_.valid_rows() + tokens.first, tokens.count, vocab_ids);
  }
  run_.sort_chunk_targets(chunk);
  run_.set_outputs(chunk);
  if (run_.sharded()) {
    if (run_.plan.kind != PlanKind::far_both)
      chunk.wide = run_.at<ExactSum>(run_.layout.shard.wide);
    if (run_.plan.features.argmax) chunk.best = run_.at<float>(run_.layout.shard.best);
  }
  chunk.store = run_.sizes.stored_vocab > 0;
  chunk.tile_mass = run_.plan.kind == PlanKind::far_backward;
  if (run_.plan.kind == PlanKind::far_both) {
    far_.forward(chunk, tokens.first);
  } else if (run_.empty()) {
    forward_nothing(chunk);
  } else {
    run_.kernel.forward(chunk);
  }
  if (run_.sharded()) {
    ranks_.merge_states(chunk);
    if (run_.far()) far_.keep_audited(chunk, tokens);
  }
  run_.set_coefficients_of_tokens(chunk, tokens, function);
  if (!backward_wanted) return;
  backward(chunk, tokens, first_chunk, last_chunk);
  if (!run_.sharded()) return;
  if (run_.plan.features.d_hidden) {
    const std::span<const float> sums = ranks_.reduce_hidden(tokens);
    if (run_.far()) far_.keep_hidden(tokens, sums);
    run_.store_hidden(tokens.first, std::ssize(sums) / run_.call.shape.dim, sums.data());
  }
  if (run_.plan.kind == PlanKind::far_backward) far_.exchange_bounds(tokens);
}

void Engine::backward(const ForwardChunk& forward, const ChunkTokens& tokens, bool first_chunk,
                      bool last_chunk) {
  if (run_.empty()) return;
  const std::int64_t first = tokens.first;
  BackwardChunk chunk;
  static_cast<ChunkCommon&>(chunk) = forward;
  chunk.exponent = forward.exponent;
  chunk.alpha = run_.at<float>(run_.layout.alpha);
  if (run_.plan.features.entropy_gradient) chunk.beta = run_.at<float>(run_.layout.beta);
  if (run_.plan.features.label_smoothing) chunk.gamma = run_.at<float>(run_.layout.gamma);
  chunk.coefficient = run_.at<float>(run_.layout.coefficient);
  chunk.stored = forward.store;
  if (run_.plan.features.d_hidden && run_.sharded()) {
    chunk.d_hidden = {run_.at<float>(run_.layout.shard.slices),
                      run_.at<std::int64_t>(run_.layout.shard.place),
                      DType::f32,
                      run_.call.shape.dim,
                      1,
                      false};
  } else if (run_.plan.features.d_hidden) {
    const RowMatrix m = as_rows("d_hidden", run_.call.gradients.d_hidden);
    chunk.d_hidden = {run_.call.gradients.d_hidden.data(),
                      run_.at<std::int64_t>(run_.layout.rows) + first,
                      run_.call.gradients.d_hidden.dtype(),
                      m.row_stride,
                      m.column_stride,
                      run_.call.features.accumulate};
    if (run_.chosen.chosen()) chunk.d_hidden.rows = run_.chosen.to + first;
  }
  if (run_.weight_apart()) {
    keep_coefficients(run_, forward, first);
  } else if (run_.plan.features.d_weight) {
    chunk.d_weight = run_.weight_sink(first_chunk, last_chunk);
    chunk.d_weight.rows = chunk.weight.rows;
  }
  if (run_.plan.features.d_bias) chunk.d_bias = run_.at<float>(run_.layout.d_bias);
  if (run_.far()) return far_.backward(chunk, first);
  if (run_.weight_apart() && chunk.d_hidden.data == nullptr && chunk.d_bias == nullptr) return;
  run_.kernel.backward(chunk);
}

void Engine::finish_bias() const {
  const float* sums = run_.at<float>(run_.layout.d_bias);
  const TensorView& to = run_.call.gradients.d_bias;
  for (std::int64_t j = 0; j < run_.vocab.rows(); ++j) {
    const std::int64_t index = run_.row_at(j) * to.stride(0);
    const double old =
        run_.call.features.accumulate ? load_element(to.data(), to.dtype(), index) : 0.0;
    store_element(to.data(), to.dtype(), index, old + static_cast<double>(sums[j]));
  }
}

}  // namespace logitless::cpu

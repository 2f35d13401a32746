#include "head/cpu/engine.h"

#include <algorithm>
#include <numeric>

#include "head/cpu/weight_gathered.h"

namespace logitless::cpu {
namespace {

MatrixRows matrix(std::string_view name, const ConstTensorView& view, const std::int64_t* rows) {
  const RowMatrix m = as_rows(name, view);
  return {view.data(), view.dtype(), m.row_stride, m.column_stride, rows};
}

}  // namespace

Engine::Engine(const HeadCall& call, const ChosenRows& chosen)
    : run_(call, chosen), bound_(call.far.d_hidden_bound) {}
void Engine::set_common(ChunkCommon& chunk, const ChunkTokens& tokens) const {
  chunk.shape = run_.plan.shape;
  chunk.features = &run_.plan.features;
  chunk.sizes = run_.sizes;
  chunk.tokens = tokens.count;
  chunk.threads = run_.plan.threads;
  if (run_.call.shard.tokens_sharded) {
    chunk.hidden = {run_.at<std::byte>(run_.layout.shard.hidden), run_.call.shape.dtype,
                    run_.call.shape.dim, 1, run_.at<std::int64_t>(run_.layout.shard.place)};
  } else {
    chunk.hidden = matrix("hidden", run_.call.in.hidden,
                          run_.at<std::int64_t>(run_.layout.rows) + tokens.first);
  }
  chunk.weight = matrix("weight", run_.call.in.weight,
                        run_.far() ? run_.call.far.order->vocab_ids().data() : nullptr);
  chunk.bias = run_.bias;
  chunk.logit_weights = run_.logit_weights;
  chunk.targets = {run_.at<SparseEntry>(run_.layout.entries),
                   run_.at<std::int32_t>(run_.layout.tile_begin),
                   run_.at<std::int32_t>(run_.far()       ? run_.layout.far.positions
                                         : run_.sharded() ? run_.layout.shard.rows
                                                          : run_.layout.vocab_ids)};
  chunk.scratch = run_.at<std::byte>(run_.layout.scratch);
}

std::int64_t Engine::count_tokens() {
  all_valid_ = run_.valid;
  if (!run_.call.shard.tokens_sharded) return run_.valid;
  gather_counts();
  const auto* counts = run_.at<std::int64_t>(run_.layout.shard.counts);
  all_valid_ = std::accumulate(counts, counts + run_.call.shard.ranks(), std::int64_t{0});
  return *std::max_element(counts, counts + run_.call.shard.ranks());
}

void Engine::run(TokenFunction function) {
  const std::int64_t most = count_tokens();
  if (run_.gathered()) return run_weight_gathered(run_, all_valid_, function);
  const bool backward_wanted = run_.wants_gradients();
  if (backward_wanted && !run_.chosen.chosen()) run_.clear_ignored(all_valid_);
  if (backward_wanted && run_.plan.features.d_bias) {
    std::fill_n(run_.at<float>(run_.layout.d_bias), run_.call.shape.vocab, 0.0f);
  }
  if (run_.far()) start_far();
  // Chunks have equal sizes: a short last one would waste the fixed work of a
  // chunk.
  const std::int64_t capacity = run_.call.shard.tokens_sharded
                                    ? run_.sizes.tokens / run_.call.shard.ranks()
                                    : run_.sizes.tokens;
  const std::int64_t chunks = ceil_div(std::max<std::int64_t>(most, 1), capacity);
  step_ = ceil_div(most, chunks);
  for (std::int64_t first = 0; first < most; first += step_)
    run_chunk(chunk_tokens(first), first == 0, first + step_ >= most, function);
  if (backward_wanted && run_.plan.features.d_bias) finish_bias();
  if (weight_apart()) run_weight_pass();
}

ChunkTokens Engine::chunk_tokens(std::int64_t first) const {
  ChunkTokens out;
  out.first = first;
  out.step = step_;
  out.local_count = std::clamp<std::int64_t>(run_.valid - first, 0, step_);
  out.count = out.local_count;
  if (!run_.call.shard.tokens_sharded) return out;
  out.count = 0;
  const auto* counts = run_.at<std::int64_t>(run_.layout.shard.counts);
  for (int r = 0; r < run_.call.shard.ranks(); ++r) {
    out.count += std::clamp<std::int64_t>(counts[r] - first, 0, step_);
  }
  return out;
}

// Sorts the chunk's targets, whose token ids are already read.
void Engine::sort_chunk_targets(const ChunkCommon& chunk) const {
  sort_targets(
      {run_.at<std::int32_t>(run_.layout.vocab_ids),
       const_cast<std::int32_t*>(chunk.targets.vocab_ids),
       run_.at<SparseEntry>(run_.layout.entries), run_.at<std::int32_t>(run_.layout.tile_begin)},
      chunk.tokens, run_.plan.features.targets_per_token, run_.call.shape.vocab,
      LocalRows(run_.vocab, run_.far() ? run_.call.far.order->positions().data() : nullptr));
}

void Engine::run_chunk(const ChunkTokens& tokens, bool first_chunk, bool last_chunk,
                       TokenFunction function) {
  const bool backward_wanted = run_.wants_gradients();
  ForwardChunk chunk;
  set_common(chunk, tokens);
  auto* vocab_ids = run_.at<std::int32_t>(run_.layout.vocab_ids);
  if (run_.sharded()) {
    locate_targets(tokens, vocab_ids);
  } else {
    read_targets(run_.targets, run_.valid_rows() + tokens.first, tokens.count, vocab_ids);
  }
  sort_chunk_targets(chunk);
  run_.set_outputs(chunk);
  if (run_.sharded()) {
    if (run_.plan.kind != PlanKind::far_both)
      chunk.wide = run_.at<ExactSum>(run_.layout.shard.wide);
    if (run_.plan.features.argmax) chunk.best = run_.at<float>(run_.layout.shard.best);
  }
  chunk.store = run_.sizes.stored_vocab > 0;
  chunk.tile_mass = run_.plan.kind == PlanKind::far_backward;
  if (run_.plan.kind == PlanKind::far_both) {
    far_forward(chunk, tokens.first);
  } else if (run_.empty()) {
    forward_nothing(chunk);
  } else {
    run_.kernel.forward(chunk);
  }
  if (run_.sharded()) {
    exchange_states(chunk);
    if (audited_ > 0) keep_audited(chunk, tokens);
  }
  run_.set_coefficients_of_tokens(chunk, tokens, function);
  if (!backward_wanted) return;
  backward(chunk, tokens, first_chunk, last_chunk);
  if (!run_.sharded()) return;
  if (run_.plan.features.d_hidden) exchange_hidden(tokens);
  if (run_.plan.kind == PlanKind::far_backward) exchange_bounds(tokens);
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
  if (weight_apart()) {
    keep_coefficients(forward, first);
  } else if (run_.plan.features.d_weight) {
    chunk.d_weight = weight_sink(first_chunk, last_chunk);
    chunk.d_weight.rows = chunk.weight.rows;
  }
  if (run_.plan.features.d_bias) chunk.d_bias = run_.at<float>(run_.layout.d_bias);
  if (run_.far()) return far_backward(chunk, first);
  if (weight_apart() && chunk.d_hidden.data == nullptr && chunk.d_bias == nullptr) return;
  run_.kernel.backward(chunk);
}

WeightGradientSink Engine::weight_sink(bool first_chunk, bool last_chunk) const {
  WeightGradientSink sink;
  sink.data = run_.call.gradients.d_weight.data();
  sink.dtype = run_.call.gradients.d_weight.dtype();
  sink.row_stride = run_.call.gradients.d_weight.stride(0);
  sink.col_stride = run_.call.gradients.d_weight.stride(1);
  sink.accumulate = run_.call.features.accumulate;
  sink.first_chunk = first_chunk;
  sink.last_chunk = last_chunk;
  if (!(first_chunk && last_chunk) && sink.dtype == DType::bf16)
    sink.low = run_.at<std::uint16_t>(run_.layout.d_weight);
  if (!(first_chunk && last_chunk) && sink.dtype == DType::f16)
    sink.accumulator = run_.at<float>(run_.layout.d_weight);
  return sink;
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

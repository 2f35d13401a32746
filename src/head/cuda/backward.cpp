#include "head/cuda/backward.h"

#include <algorithm>

#include "head/cuda/listed_tokens.h"
#include "kernels/device/entropy_block.h"

namespace logitless::cuda {

Backward::Backward(const Run& run, Part part)
    : Backward(run, {run.d_weight, run.d_bias, run.at<float>(run.layout.gradients.d_bias)}, false) {
  if (part == Part::rest) to_.d_weight.data = nullptr;
  if (part == Part::weight) to_.d_bias.data = nullptr;
  hidden_ = hidden_ && part != Part::weight;
}

Backward::Backward(const Run& run, const VocabGradients& to, bool adds_hidden)
    : run_(run),
      to_(to),
      hidden_(run.wants_hidden()),
      adds_hidden_(adds_hidden),
      round_hidden_(sums_hidden(run.all.shape.vocab, run.features, run.sizes)),
      round_weight_(sums_weight(run.kernel, run.plan_tokens(), run.features, run.sizes)) {}

TargetOrder Backward::target_order() const {
  return {run_.at<std::int32_t>(run_.layout.gradients.vocab_ids),
          run_.at<std::int32_t>(run_.layout.gradients.slots),
          run_.at<std::int32_t>(run_.layout.gradients.places),
          run_.at<std::int32_t>(run_.layout.gradients.counts)};
}

TargetEntries Backward::target_entries() const {
  const bool many = to_.d_weight.data != nullptr &&
                    adds_entries(run_.kernel, run_.plan_tokens(), run_.features, run_.sizes);
  return {run_.at<std::int32_t>(run_.layout.gradients.entry_begin),
          run_.at<std::int32_t>(run_.layout.gradients.entry_vocab),
          run_.at<std::int32_t>(run_.layout.gradients.entry_tokens),
          run_.at<float>(run_.layout.gradients.entry_values),
          many ? run_.at<float>(run_.layout.gradients.many) : nullptr};
}

std::int32_t Backward::fixed_tokens(const ForwardCall& chunk) const {
  const auto tokens = static_cast<std::int32_t>(chunk.shape.tokens);
  if (run_.sizes.far || run_.kernel.gemms_skip == GemmsSkip::nothing) return tokens;
  if (run_.kernel.gemms_skip == GemmsSkip::ignored) return 0;
  if (run_.sharded() || !run_.layout.list.wanted || !rows_are_aligned(chunk)) return tokens;
  const std::int64_t expected =
      expected_tokens(run_.all.shape.tokens, run_.call.plan->expected_ignored);
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(expected - chunk.first_token, 0, tokens));
}

// d_weight's memory may hold the block.
bool Backward::rows_are_aligned(const ForwardCall& chunk) const {
  const auto aligned = [](const void* data, std::int64_t stride, DType dtype) {
    const std::int64_t bytes = stride * static_cast<std::int64_t>(size_of(dtype));
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
  };
  const DType dtype = chunk.shape.dtype;
  return aligned(nullptr, chunk.shape.dim, dtype) &&
         aligned(chunk.weight, chunk.weight_stride, dtype) &&
         aligned(to_.d_weight.data, to_.d_weight.stride, to_.d_weight.dtype);
}

BlockCall Backward::block_call(const ForwardCall& chunk) const {
  BlockCall b;
  b.chunk = chunk;
  b.rows = run_.coefficients(chunk.first_token);
  b.delta = run_.delta(chunk.first_token);
  b.block = chunk.block;
  b.factor = run_.at<float>(run_.layout.gradients.factor);
  b.coefficient = run_.at<float>(run_.layout.gradients.coefficient);
  b.entropy_part = run_.features.entropy_gradient;
  b.smoothing = run_.features.label_smoothing;
  b.smoothing_apart = smooths_apart(run_.features);
  b.fixed_tokens = fixed_tokens(chunk);
  return b;
}

// Computes what all blocks of a chunk read. Its blocks may overwrite hidden.
BlockCall Backward::begin_chunk(const ForwardCall& chunk) const {
  order_targets(chunk, target_order());
  if (smooths_apart(run_.features) && to_.d_weight.data != nullptr) sum_hidden(chunk);
  return block_call(chunk);
}

void Backward::chunk(const ForwardCall& chunk, const ChunkPlace& place) const {
  if (!hidden_ && to_.d_weight.data == nullptr && to_.d_bias.data == nullptr) return;
  BlockCall b = begin_chunk(chunk);
  const std::int64_t vocab = chunk.shape.vocab;
  for (std::int64_t vocab_id = 0; vocab_id < vocab;) {
    b.vocab_begin = vocab_id;
    run_block(b, place);
    vocab_id += b.vocab_count;
    if (b.scaled_hidden == chunk.hidden && vocab_id < vocab) ListedTokens(run_).gather(chunk);
  }
  round_hidden(chunk);
}

void Backward::vocab_block(const ForwardCall& chunk, std::int64_t vocab_begin,
                           const ChunkPlace& place) const {
  BlockCall b = begin_chunk(chunk);
  b.vocab_begin = vocab_begin;
  run_block(b, place);
}

// Returns where the block's scaled hidden states go; null if it needs none.
void* Backward::scaled_hidden(const BlockCall& b) const {
  const bool lists = run_.layout.list.wanted;
  if (to_.d_weight.data == nullptr ||
      !(b.from_forward || clears_hidden(run_.kernel, lists, run_.sizes)) ||
      !scales_hidden(run_.kernel, lists, run_.features, run_.sizes))
    return nullptr;
  return scales_in_place(lists, run_.features)
             ? const_cast<void*>(b.chunk.hidden)
             : run_.at<std::byte>(run_.layout.gradients.scaled_hidden);
}

// Computes the gradients of a vocabulary block from its first entry on, and sets its size.
void Backward::run_block(BlockCall& b, const ChunkPlace& place) const {
  b.from_forward = b.vocab_begin < run_.sizes.stored;
  if (b.from_forward) {
    b.vocab_count = std::min(run_.sizes.stored, b.chunk.shape.vocab);
  } else {
    set_vocab_block(b);
  }
  b.scaled_hidden = scaled_hidden(b);
  b.scales =
      b.chunk.shape.dtype == DType::f16 ? run_.at<float>(run_.layout.gradients.scales) : nullptr;
  if (b.scales != nullptr) scale_block(b);
  if (!b.from_forward) {
    run_.kernel.gradient_block(b);
  } else if (b.entropy_part) {
    scale_by_logits(b);
  }
  prepare_block(b);
  list_targets(b, target_order(), target_entries());
  if (to_.d_bias.data != nullptr) sum_bias(b, place.first);
  products(b, place, b.vocab_begin == 0);
}

// Sets the offset and size of a vocabulary block whose exponentials are not saved.
void Backward::set_vocab_block(BlockCall& b) const {
  const AliasedBlock vocab_block =
      vocab_block_of(run_.call.plan->shape, run_.features, run_.sizes, b.vocab_begin);
  b.vocab_count = std::min(vocab_block.vocab_count, b.chunk.shape.vocab - b.vocab_begin);
  b.chunk.ranges = {};
  if (vocab_block.in_weight) {
    const std::int64_t row = b.vocab_begin + vocab_block.vocab_count;
    b.block = {advance(to_.d_weight.data, row * to_.d_weight.stride, to_.d_weight.dtype),
               vocab_block.vocab_count};
  } else {
    b.block = b.chunk.block;
  }
}

GradientGemmsCall Backward::gemms_call(const ForwardCall& c) const {
  GradientGemmsCall p;
  p.tokens = c.shape.tokens;
  p.fixed_tokens = fixed_tokens(c);
  p.dim = c.shape.dim;
  p.dtype = c.shape.dtype;
  p.weight_dtype = c.shape.weight_dtype();
  p.precision = c.shape.precision;
  p.factored_hidden = p.hidden = c.hidden;
  p.factored_stride = p.hidden_stride = c.hidden_stride;
  if (c.original.data != nullptr) {
    p.hidden = c.original.data;
    p.hidden_stride = c.original.stride;
  }
  p.targets_per_token = c.shape.targets_per_token;
  p.vocab_ids = target_order().vocab_ids;
  p.coefficient = run_.at<float>(run_.layout.gradients.coefficient);
  p.factor = run_.at<float>(run_.layout.gradients.factor);
  p.rows = run_.coefficients(c.first_token);
  p.kernel_workspace = c.workspace;
  p.kernel_workspace_bytes =
      adds_entries(run_.kernel, run_.plan_tokens(), run_.features, run_.sizes)
          ? run_.layout.gradients.many - run_.layout.forward
          : run_.layout.forward_bytes;
  p.stream = c.stream;
  return p;
}

void Backward::sum_weights(const ForwardCall& c, const void* rows, std::int64_t count,
                           const float* logit_weights) const {
  ColumnSumCall sum;
  sum.dtype = c.shape.weight_dtype();
  sum.columns = c.shape.dim;
  sum.workspace = run_.at<std::byte>(run_.layout.gradients.column_sums);
  sum.stream = c.stream;
  sum.matrix = rows;
  sum.rows = count;
  sum.stride = c.weight_stride;
  sum.weights = logit_weights;
  sum.out = run_.at<float>(run_.layout.gradients.weight_sum);
  sum_columns(sum);
}

void Backward::sum_hidden(const ForwardCall& c) const {
  ColumnSumCall sum;
  sum.dtype = c.shape.dtype;
  sum.columns = c.shape.dim;
  sum.workspace = run_.at<std::byte>(run_.layout.gradients.column_sums);
  sum.stream = c.stream;
  sum.matrix = c.hidden;
  sum.rows = c.shape.tokens;
  sum.stride = c.hidden_stride;
  sum.weights = &run_.coefficients(c.first_token)->gamma;
  sum.weight_stride = sizeof(RowCoefficients) / sizeof(float);
  sum.out = run_.at<float>(run_.layout.gradients.hidden_sum);
  sum_columns(sum);
}

GradientOutput Backward::hidden_sums(const ForwardCall& c, bool first) const {
  if (round_hidden_) {
    // The far field's sums are in the local order and are scattered into that of the exchange.
    const bool local = run_.sizes.far && run_.sharded();
    return {run_.at<std::byte>(local ? run_.layout.shard.received : run_.layout.gradients.d_hidden),
            c.shape.dim, DType::f32, !first || adds_hidden_};
  }
  GradientOutput out = run_.d_hidden;
  out.data = advance(run_.d_hidden.data, c.first_token * run_.d_hidden.stride, run_.d_hidden.dtype);
  out.add = run_.features.accumulate || !first;
  return out;
}

GradientOutput Backward::weight_sums(bool first_chunk) const {
  GradientOutput out = round_weight_
                           ? GradientOutput{run_.at<std::byte>(run_.layout.gradients.d_weight),
                                            run_.all.shape.dim, DType::f32, false}
                           : to_.d_weight;
  out.add = (!round_weight_ && run_.features.accumulate) || !first_chunk;
  return out;
}

RunningSums Backward::running_sums(const BlockCall& block, const ChunkPlace& place) const {
  RunningSums out;
  if (round_weight_ || to_.d_weight.dtype == DType::f32) return out;
  if (splits_weight(run_.kernel, run_.plan_tokens(), run_.features, run_.sizes))
    out.low =
        run_.at<std::uint8_t>(run_.layout.gradients.weight_low) +
        running_sum_bytes(run_.sizes.weight_apart ? 0 : block.vocab_begin, run_.all.shape.dim);
  out.from = !place.first               ? SumsFrom::sums
             : run_.features.accumulate ? SumsFrom::output
                                        : SumsFrom::nothing;
  out.last = place.last;
  return out;
}

void Backward::products(const BlockCall& block, const ChunkPlace& place,
                        bool first_vocab_block) const {
  const ForwardCall& c = block.chunk;
  GradientGemmsCall p = gemms_call(c);
  p.block_vocab = block.vocab_count;
  p.block = block.block;
  p.ranges = c.ranges;
  p.weight = advance(c.weight, block.vocab_begin * c.weight_stride, p.weight_dtype);
  p.weight_stride = c.weight_stride;
  if (block.scaled_hidden != nullptr) {
    p.factored_hidden = block.scaled_hidden;
    p.factored_stride = c.shape.dim;
  }
  p.vocab_begin = static_cast<std::int32_t>(block.vocab_begin);
  p.entries = target_entries();
  p.active = c.active;
  if (smooths_apart(run_.features)) {
    const float* const logit_weights =
        c.logit_weights == nullptr ? nullptr : c.logit_weights + block.vocab_begin;
    p.logit_weights = logit_weights;
    if (hidden_) {
      p.weight_sum = run_.at<float>(run_.layout.gradients.weight_sum);
      if (place.first || run_.sizes.vocab_block < c.shape.vocab)  // else it is still there
        sum_weights(c, p.weight, p.block_vocab, logit_weights);
    }
    if (to_.d_weight.data != nullptr) {
      p.hidden_sum = run_.at<float>(run_.layout.gradients.hidden_sum);
    }
  }
  if (hidden_) p.d_hidden = hidden_sums(c, first_vocab_block);
  if (run_.call.shard.comm_stream != nullptr && !run_.gathered() && hidden_ &&
      block.vocab_begin + block.vocab_count >= c.shape.vocab)
    p.hidden_done = run_.call.shard.comm_stream->hidden_done.get();
  if (to_.d_weight.data != nullptr) {
    p.d_weight = weight_sums(place.first);
    p.weight_unscale = block.scales == nullptr ? nullptr : block.scales + 1;
    p.d_weight.data =
        advance(p.d_weight.data, block.vocab_begin * p.d_weight.stride, p.d_weight.dtype);
    p.running = running_sums(block, place);
  }
  run_.kernel.gradient_gemms(p);
}

void Backward::sum_bias(const BlockCall& block, bool first_chunk) const {
  const ForwardCall& c = block.chunk;
  float* const sums = to_.bias_sums + block.vocab_begin;
  ColumnSumCall sum;
  sum.dtype = c.shape.dtype;
  sum.rows = c.shape.tokens;
  sum.all_columns = block.vocab_count;
  sum.weights = block.factor;
  sum.add = !first_chunk;
  sum.workspace = run_.at<std::byte>(run_.layout.gradients.column_sums);
  sum.stream = c.stream;
  const auto add = [&](const LogitBlock& columns, std::int64_t first, std::int64_t count) {
    sum.matrix = columns.data;
    sum.stride = columns.stride;
    sum.columns = count;
    sum.out = sums + first;
    sum_columns(sum);
  };
  const VocabRanges& ranges = c.ranges;
  if (ranges.count == 0) add(block.block, 0, block.vocab_count);
  for (int r = 0; r < ranges.count; ++r)
    add({ranges.data[r], ranges.stride(r)}, ranges.first[r], ranges.vocab_count(r));
  add_bias_parts(block, sums);
}

void Backward::add_bias_parts(const BlockCall& block, float* sums) const {
  const ForwardCall& c = block.chunk;
  add_bias_targets(target_entries(), block.vocab_count, sums, c.stream);
  if (smooths_apart(run_.features)) {
    add_bias_smoothing(block.rows, c.shape.tokens,
                       c.logit_weights == nullptr ? nullptr : c.logit_weights + block.vocab_begin,
                       block.vocab_count, sums, c.stream);
  }
}

void Backward::round_hidden(const ForwardCall& chunk) const {
  if (!round_hidden_ || run_.sharded()) return;
  GradientOutput out = run_.d_hidden;
  const std::int32_t* const to = chunk.rows != nullptr ? chunk.rows + chunk.first_token : nullptr;
  if (to == nullptr) out.data = advance(out.data, chunk.first_token * out.stride, out.dtype);
  round_sums(run_.at<float>(run_.layout.gradients.d_hidden), chunk.shape.tokens, chunk.shape.dim,
             out, chunk.stream, to);
}

void Backward::round_weights() const {
  if (round_weight_) {
    round_sums(run_.at<float>(run_.layout.gradients.d_weight), run_.all.shape.vocab,
               run_.all.shape.dim, to_.d_weight, run_.all.stream);
  }
  if (to_.d_bias.data != nullptr)
    round_sums(to_.bias_sums, 1, run_.all.shape.vocab, to_.d_bias, run_.all.stream);
}

}  // namespace logitless::cuda

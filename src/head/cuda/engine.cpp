#include "head/cuda/engine.h"

#include <algorithm>

#include "core/check.h"
#include "head/cuda/views.h"
#include "kernels/device/shard.h"

namespace logitless::cuda {
namespace {

// Advances a pointer by a number of elements of the dtype.
template <typename Pointer>
Pointer advance(Pointer data, std::int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte,
                                  std::byte>;
  return static_cast<Byte*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}

}  // namespace

Engine::Engine(const HeadCall& call, OperandsAlone)
    : call_(call),
      kernel_(find_device_kernel(call.plan->kernel)),
      features_(call.shard.gathered != nullptr ? features_of_slices(call.features) : call.features),
      layout_(LossPlanAccess::layout<Layout>(*call.plan)),
      sizes_(layout_.sizes),
      layout_tokens_(call.plan->shape.tokens),
      base_(static_cast<std::byte*>(call.workspace->data())),
      exchange_(base_) {
  if (call.shard.comm_stream != nullptr && call.shard.comm_stream->memory != nullptr)
    exchange_ = static_cast<std::byte*>(call.shard.comm_stream->memory) - layout_.exchange;
  require_fit();
  set_operands();
}

Engine::Engine(const HeadCall& call) : Engine(call, OperandsAlone()) {
  set_gradients();
  set_outputs();
  set_far();
  if (sharded()) require_aligned_operands();
}

void Engine::require_fit() const {
  const HeadShape& made = call_.plan->shape;
  const HeadShape& shape = call_.shape;
  require(made.dim == shape.dim && made.vocab == shape.vocab && made.dtype == shape.dtype &&
              shape.tokens <= made.tokens,
          "plan: made for ", made.tokens, " tokens x ", made.vocab, " vocabulary entries x ",
          made.dim, ", called with ", shape.tokens, " x ", shape.vocab, " x ", shape.dim);
  require(
      call_.plan->weight_ranges == 0 || !features_.d_weight_strided,
      "d_weight: expected rows that follow one another, since the plan keeps exp(z) there; plan "
      "from the tensors themselves");
  require(serves(*call_.plan, call_.features),
          "plan: made for other options, inputs or outputs than this call's; plan again with the "
          "same arguments");
  // The audit's plan has its own workspace behind this one's.
  require(call_.workspace->bytes() >= call_.plan->workspace_bytes(),
          "workspace: ", call_.workspace->bytes(), " bytes, the plan needs ",
          call_.plan->workspace_bytes());
  require(reinterpret_cast<std::uintptr_t>(base_) % 256 == 0,
          "workspace: expected an address aligned to 256 bytes");
}

DeviceStatistics* Engine::statistics() const { return at<DeviceStatistics>(layout_.statistics); }
void Engine::reset_bad_targets() const {
  static_assert(kNoBadTarget == ~std::uint64_t{0});
  static_assert(offsetof(DeviceStatistics, bad_rank) == sizeof(std::uint64_t));
  // All bits of bad_target (kNoBadTarget) and of bad_rank (-1) are 1.
  fill_device(statistics(), 0xff, sizeof(std::uint64_t) + sizeof(std::int64_t), all.stream);
}
void* Engine::loss_workspace() const { return base_ + layout_.loss; }

void Engine::set_operands() {
  const LossPlan& plan = *call_.plan;
  const HeadOperands& in = call_.in;
  all.shape = forward_shape(call_.shape, features_);
  all.logit_scale = features_.logit_scale;
  all.softcap = features_.softcap;
  all.stream = call_.context->stream();
  all.bad_target = &statistics()->bad_target;
  all.workspace = base_ + layout_.forward;
  far_.tau = plan.tau;
  all.hidden = in.hidden.data();
  all.hidden_stride = rows_of("hidden", in.hidden).row_stride;
  all.weight = in.weight.data();
  all.weight_stride = rows_of("weight", in.weight).row_stride;
  require_contiguous("targets", in.targets);
  all.targets = in.targets.data();
  all.int64_targets = in.targets.dtype() == DType::i64;
  all.ignore_index = in.ignore_index;
  all.sequence = in.sequence;
  all.bias = floats_of("bias", in.bias);
  all.logit_weights = floats_of("vocab_weight", in.logit_weights);
  if (!sharded()) return;
  all.global_vocab = call_.shape.global_vocab;
  if (gathered()) return;  // each block sets its own vocabulary entries
  all.vocab_begin = call_.shard.vocab.rows() > 0 ? call_.shard.vocab.vocab_id(0) : 0;
  all.vocab_ids = static_cast<const std::int32_t*>(comm().vocab_ids.get());
  if (all.logit_weights == nullptr) return;
  if (all.vocab_ids == nullptr) {
    all.logit_weights += all.vocab_begin;
  } else {
    auto* const of_rows = at<float>(layout_.shard.logit_weights);
    take_vocab(all.logit_weights, all.vocab_ids, call_.shard.vocab.rows(), of_rows, all.stream);
    all.logit_weights = of_rows;
  }
}

void Engine::set_outputs() {
  const TokenOutputs& out = call_.out;
  all.lse = floats_of("lse", out.lse);
  all.log_prob = floats_of("log_prob", out.log_prob);
  all.target_logit = floats_of("target_logit", out.target_logit);
  all.entropy = floats_of("entropy", out.entropy);
  all.weighted_sum = floats_of("weighted_logit_sum", out.weighted_sum);
  if (!out.argmax.defined()) return;
  require_contiguous("argmax", out.argmax);
  if (out.argmax.dtype() == DType::i64) {
    int64_argmax_ = static_cast<std::int64_t*>(out.argmax.data());
  } else {
    all.argmax = static_cast<std::int32_t*>(out.argmax.data());
  }
}

void Engine::set_gradients() {
  const auto output = [&](std::string_view name, const TensorView& view, bool matrix) {
    GradientOutput out;
    if (!view.defined()) return out;
    if (!matrix) require_contiguous(name, view);
    out.data = view.data();
    out.stride = matrix ? rows_of(name, view).row_stride : view.numel();
    out.dtype = view.dtype();
    out.add = call_.features.accumulate;
    return out;
  };
  d_hidden_ = output("d_hidden", call_.gradients.d_hidden, true);
  d_weight_ = output("d_weight", call_.gradients.d_weight, true);
  d_bias_ = output("d_bias", call_.gradients.d_bias, false);
  round_hidden_ = sums_hidden(kernel_, all.shape.vocab, features_, sizes_);
  round_weight_ = sums_weight(kernel_, layout_tokens_, features_, sizes_);
}

ForwardCall Engine::chunk_call(const ForwardCall& of, std::int64_t first,
                               std::int64_t count) const {
  ForwardCall c = of;
  const DType dtype = c.shape.dtype;
  const std::int64_t slot = first * c.shape.targets_per_token;
  c.shape.tokens = count;
  c.first_token = first;
  c.hidden = advance(c.hidden, first * c.hidden_stride, dtype);
  if (sizes_.far && !sharded()) order_chunk(c);
  const auto place = [&](float* output, std::int64_t offset, std::size_t own, bool needed = true) {
    return output != nullptr ? output + offset : needed ? at<float>(own) : nullptr;
  };
  const bool gradients = wants_gradients(features_);
  c.lse = place(c.lse, first, layout_.lse);
  c.log_prob = place(c.log_prob, slot, layout_.log_prob);
  c.target_logit = place(c.target_logit, slot, layout_.target_logit, gradients);
  c.weighted_sum = place(c.weighted_sum, first, layout_.weighted_sum, c.shape.weighted_sum);
  c.entropy = place(c.entropy, first, layout_.entropy, c.shape.entropy);
  if (c.shape.argmax)
    c.argmax = c.argmax != nullptr ? c.argmax + first : at<std::int32_t>(layout_.argmax);
  if (!gradients) return c;
  c.stored_vocab = sizes_.stored;
  c.block = {base_ + layout_.gradients.block, padded_vocab(sizes_.vocab_block)};
  if (first == 0) c.ranges = aliased_ranges();
  c.reference = at<float>(layout_.gradients.reference);
  c.active = at<int>(layout_.gradients.active);
  return c;
}

VocabRanges Engine::aliased_ranges() const {
  const AliasedRanges& aliased = layout_.ranges;
  VocabRanges ranges = aliased.ranges;
  for (int r = 0; r + 1 < ranges.count; ++r) {
    const AliasedRanges::Place& place = aliased.places[r];
    ranges.data[r] =
        place.low
            ? base_ + layout_.gradients.weight_low + running_sum_bytes(place.row, all.shape.dim)
            : advance(d_weight_.data, place.row * d_weight_.stride, d_weight_.dtype);
  }
  if (ranges.count > 0) ranges.data[ranges.count - 1] = base_ + layout_.gradients.block;
  return ranges;
}

void Engine::run(const ChunkFunction& set_coefficients) {
  if (kernel_.prepare != nullptr) kernel_.prepare();
  if (gathered()) return run_gathered(set_coefficients);
  if (sharded()) return run_sharded(set_coefficients);
  const bool gradients = wants_gradients(features_);
  auto* const rows = gradients ? at<RowCoefficients>(layout_.gradients.rows) : nullptr;
  float* const delta = gradients ? at<float>(layout_.gradients.delta) : nullptr;
  const std::int64_t total = all.shape.tokens;
  std::int64_t first = 0;
  if (sizes_.far) begin_far();
  do {  // runs once even without tokens, so that outputs are cleared
    const std::int64_t most = first == 0 ? sizes_.first_chunk() : sizes_.chunk;
    const ForwardCall chunk =
        chunk_call(first, std::min(std::max<std::int64_t>(most, 1), total - first));
    last_chunk_ = first + chunk.shape.tokens == total;
    sizes_.far ? far_forward(chunk) : kernel_.forward(chunk);
    set_coefficients(chunk, rows, delta);
    if (sizes_.far) scatter_outputs(chunk, all);
    if (gradients && total > 0) {
      sizes_.far ? far_backward(chunk, first == 0) : backward(chunk, first == 0);
    }
    first += chunk.shape.tokens;
  } while (first < total);
  if (gradients && total > 0) round_weights();
  if (total == 0) clear_weights();
}

// Clears the gradients of a call without tokens.
void Engine::clear_weights() const {
  if (features_.accumulate) return;
  for (const auto& [out, rows] :
       {std::pair{&d_weight_, all.shape.vocab}, std::pair{&d_bias_, std::int64_t{1}}}) {
    if (out->data != nullptr)
      zero_gradient(*out, rows, out == &d_bias_ ? all.shape.vocab : all.shape.dim, all.stream);
  }
}

ForwardCall Engine::forward_saved() {
  if (kernel_.prepare != nullptr) kernel_.prepare();
  const ForwardCall chunk = chunk_call(0, all.shape.tokens);
  kernel_.forward(chunk);
  return chunk;
}

void Engine::backward_saved(const ChunkFunction& set_coefficients) {
  if (kernel_.prepare != nullptr) kernel_.prepare();
  if (all.shape.tokens == 0) return clear_weights();
  const ForwardCall chunk = chunk_call(0, all.shape.tokens);
  set_coefficients(chunk, at<RowCoefficients>(layout_.gradients.rows),
                   at<float>(layout_.gradients.delta));
  backward(chunk, true);
  round_weights();
}

TargetOrder Engine::target_order() const {
  return {at<std::int32_t>(layout_.gradients.vocab_ids), at<std::int32_t>(layout_.gradients.slots),
          at<std::int32_t>(layout_.gradients.places), at<std::int32_t>(layout_.gradients.counts)};
}
TargetEntries Engine::target_entries() const {
  return {at<std::int32_t>(layout_.gradients.entry_begin),
          at<std::int32_t>(layout_.gradients.entry_vocab),
          at<std::int32_t>(layout_.gradients.entry_tokens),
          at<float>(layout_.gradients.entry_values)};
}

BlockCall Engine::block_call(const ForwardCall& chunk) const {
  BlockCall b;
  b.chunk = chunk;
  b.rows = at<RowCoefficients>(layout_.gradients.rows);
  b.delta = at<float>(layout_.gradients.delta);
  b.block = chunk.block;
  b.factor = at<float>(layout_.gradients.factor);
  b.coefficient = at<float>(layout_.gradients.coefficient);
  b.entropy_part = features_.entropy_gradient;
  b.smoothing = features_.label_smoothing;
  b.smoothing_apart = smooths_apart(features_);
  return b;
}

void Engine::backward(const ForwardCall& chunk, bool first_chunk) {
  BlockCall b = block_call(chunk);
  order_targets(chunk, target_order());
  const std::int64_t vocab = chunk.shape.vocab;
  for (std::int64_t vocab_id = 0; vocab_id < vocab;) {
    b.vocab_begin = vocab_id;
    b.from_forward = vocab_id < sizes_.stored;
    if (b.from_forward) {
      b.vocab_count = std::min(sizes_.stored, vocab);
    } else {
      set_vocab_block(b);
    }
    b.scaled_hidden =
        (b.from_forward || kernel_.keeps_logits) && scales_hidden(kernel_, features_, sizes_)
            ? base_ + layout_.gradients.scaled_hidden
            : nullptr;
    b.unscale = !b.from_forward && kernel_.block_unscale != nullptr ? kernel_.block_unscale(chunk)
                                                                    : nullptr;
    if (!b.from_forward) kernel_.gradient_block(b);
    prepare_block(b);
    list_targets(b, target_order(), target_entries());
    if (d_bias_.data != nullptr) sum_bias(b, first_chunk);
    products(b, first_chunk, vocab_id == 0);
    vocab_id += b.vocab_count;
  }
  round_chunk(chunk);
}

// Sets the offset and size of a vocabulary block whose exponentials are not saved.
void Engine::set_vocab_block(BlockCall& b) const {
  const AliasedBlock vocab_block =
      vocab_block_of(call_.plan->shape, features_, sizes_, b.vocab_begin);
  b.vocab_count = std::min(vocab_block.vocab_count, b.chunk.shape.vocab - b.vocab_begin);
  b.chunk.ranges = {};
  if (vocab_block.in_weight) {
    const std::int64_t row = b.vocab_begin + vocab_block.vocab_count;
    b.block = {advance(d_weight_.data, row * d_weight_.stride, d_weight_.dtype),
               vocab_block.vocab_count};
  } else {
    b.block = b.chunk.block;
  }
}

// Returns the operands that all GEMMs of a chunk share.
GradientGemmsCall Engine::gemms_call(const ForwardCall& c) const {
  GradientGemmsCall p;
  p.tokens = c.shape.tokens;
  p.dim = c.shape.dim;
  p.dtype = c.shape.dtype;
  p.factored_hidden = p.hidden = c.hidden;
  p.factored_stride = p.hidden_stride = c.hidden_stride;
  p.targets_per_token = c.shape.targets_per_token;
  p.vocab_ids = target_order().vocab_ids;
  p.coefficient = at<float>(layout_.gradients.coefficient);
  p.factor = at<float>(layout_.gradients.factor);
  p.rows = at<RowCoefficients>(layout_.gradients.rows);
  p.kernel_workspace = c.workspace;
  p.kernel_workspace_bytes = adds_entries(kernel_, layout_tokens_, features_, sizes_)
                                 ? layout_.gradients.many - layout_.forward
                                 : layout_.forward_bytes;
  p.stream = c.stream;
  return p;
}

// Computes sum_j omega_j w_j over rows of the weights, for d_hidden.
void Engine::sum_weights(const ForwardCall& c, const void* rows, std::int64_t count,
                         const float* logit_weights) {
  ColumnSumCall sum;
  sum.dtype = c.shape.dtype;
  sum.columns = c.shape.dim;
  sum.workspace = base_ + layout_.gradients.column_sums;
  sum.stream = c.stream;
  sum.matrix = rows;
  sum.rows = count;
  sum.stride = c.weight_stride;
  sum.weights = logit_weights;
  sum.out = at<float>(layout_.gradients.weight_sum);
  sum_columns(sum);
}

// Computes sum_i gamma_i x_i, for d_weight.
void Engine::sum_hidden(const ForwardCall& c) {
  ColumnSumCall sum;
  sum.dtype = c.shape.dtype;
  sum.columns = c.shape.dim;
  sum.workspace = base_ + layout_.gradients.column_sums;
  sum.stream = c.stream;
  sum.matrix = c.hidden;
  sum.rows = c.shape.tokens;
  sum.stride = c.hidden_stride;
  sum.weights = &at<RowCoefficients>(layout_.gradients.rows)->gamma;
  sum.weight_stride = sizeof(RowCoefficients) / sizeof(float);
  sum.out = at<float>(layout_.gradients.hidden_sum);
  sum_columns(sum);
}

// Returns the output of the chunk's d_hidden GEMMs. The first one overwrites, unless the call
// accumulates.
GradientOutput Engine::hidden_sums(const ForwardCall& c, bool first) const {
  if (round_hidden_) {
    // The far field's sums are in the local order and are scattered into that of the exchange.
    const bool local = sizes_.far && sharded();
    return {at<std::byte>(local ? layout_.shard.received : layout_.gradients.d_hidden), c.shape.dim,
            DType::f32, !first || adds_hidden_};
  }
  GradientOutput out = d_hidden_;
  out.data = advance(d_hidden_.data, c.first_token * d_hidden_.stride, d_hidden_.dtype);
  out.add = features_.accumulate || !first;
  return out;
}
GradientOutput Engine::weight_sums(bool first_chunk) const {
  GradientOutput out = round_weight_ ? GradientOutput{base_ + layout_.gradients.d_weight,
                                                      all.shape.dim, DType::f32, false}
                                     : d_weight_;
  out.add = (!round_weight_ && features_.accumulate) || !first_chunk;
  return out;
}

RunningSums Engine::running_sums(const BlockCall& block, bool first_chunk) const {
  RunningSums out;
  if (round_weight_ || d_weight_.dtype == DType::f32) return out;
  if (splits_weight(kernel_, layout_tokens_, features_, sizes_))
    out.low = at<std::uint8_t>(layout_.gradients.weight_low) +
              running_sum_bytes(block.vocab_begin, all.shape.dim);
  out.from = !first_chunk           ? SumsFrom::sums
             : features_.accumulate ? SumsFrom::output
                                    : SumsFrom::nothing;
  out.last = last_chunk_;
  return out;
}

void Engine::add_many_entries(GradientGemmsCall& p) const {
  if (!adds_entries(kernel_, layout_tokens_, features_, sizes_)) return;
  sum_many_entries(p, at<float>(layout_.gradients.many));
  p.many = at<float>(layout_.gradients.many);
}

void Engine::products(const BlockCall& block, bool first_chunk, bool first_vocab_block) {
  const ForwardCall& c = block.chunk;
  const DType dtype = c.shape.dtype;
  GradientGemmsCall p = gemms_call(c);
  p.block_vocab = block.vocab_count;
  p.block = block.block;
  p.ranges = c.ranges;
  p.weight = advance(c.weight, block.vocab_begin * c.weight_stride, dtype);
  p.weight_stride = c.weight_stride;
  if (block.scaled_hidden != nullptr) {
    p.factored_hidden = block.scaled_hidden;
    p.factored_stride = c.shape.dim;
  }
  p.vocab_begin = static_cast<std::int32_t>(block.vocab_begin);
  p.entries = target_entries();
  p.active = kernel_.keeps_logits ? nullptr : c.active;
  if (smooths_apart(features_)) {
    const float* const logit_weights =
        c.logit_weights == nullptr ? nullptr : c.logit_weights + block.vocab_begin;
    p.logit_weights = logit_weights;
    if (wants_hidden()) {
      p.weight_sum = at<float>(layout_.gradients.weight_sum);
      if (first_chunk || sizes_.vocab_block < c.shape.vocab)  // else it is still there
        sum_weights(c, p.weight, p.block_vocab, logit_weights);
    }
    if (d_weight_.data != nullptr) {
      p.hidden_sum = at<float>(layout_.gradients.hidden_sum);
      sum_hidden(c);
    }
  }
  if (wants_hidden()) p.d_hidden = hidden_sums(c, first_vocab_block);
  if (call_.shard.comm_stream != nullptr && !gathered() && wants_hidden() &&
      block.vocab_begin + block.vocab_count >= c.shape.vocab)
    p.hidden_done = comm().hidden_done.get();
  if (d_weight_.data != nullptr) {
    p.d_weight = weight_sums(first_chunk);
    p.d_weight.data =
        advance(p.d_weight.data, block.vocab_begin * p.d_weight.stride, p.d_weight.dtype);
    p.running = running_sums(block, first_chunk);
    add_many_entries(p);
  }
  kernel_.gradient_gemms(p);
}

void Engine::sum_bias(const BlockCall& block, bool first_chunk) {
  const ForwardCall& c = block.chunk;
  float* const sums =
      (gathered() ? bias_sums_ : at<float>(layout_.gradients.d_bias)) + block.vocab_begin;
  ColumnSumCall sum;
  sum.dtype = c.shape.dtype;
  sum.rows = c.shape.tokens;
  sum.all_columns = block.vocab_count;
  sum.weights = block.factor;
  sum.add = !first_chunk;
  sum.workspace = base_ + layout_.gradients.column_sums;
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

// Adds the parts of targets and smoothing to d_bias.
void Engine::add_bias_parts(const BlockCall& block, float* sums) const {
  const ForwardCall& c = block.chunk;
  add_bias_targets(target_entries(), block.vocab_count, sums, c.stream);
  if (smooths_apart(features_)) {
    add_bias_smoothing(block.rows, c.shape.tokens,
                       c.logit_weights == nullptr ? nullptr : c.logit_weights + block.vocab_begin,
                       block.vocab_count, sums, c.stream);
  }
}

void Engine::round_chunk(const ForwardCall& chunk) {
  if (!round_hidden_ || sharded()) return;
  GradientOutput out = d_hidden_;
  const std::int32_t* const to = sizes_.far ? chunk.rows + chunk.first_token : nullptr;
  if (to == nullptr) out.data = advance(out.data, chunk.first_token * out.stride, out.dtype);
  round_sums(at<float>(layout_.gradients.d_hidden), chunk.shape.tokens, chunk.shape.dim, out,
             chunk.stream, to);
}

void Engine::round_weights() {
  if (round_weight_) {
    round_sums(at<float>(layout_.gradients.d_weight), all.shape.vocab, all.shape.dim, d_weight_,
               all.stream);
  }
  if (d_bias_.data != nullptr)
    round_sums(at<float>(layout_.gradients.d_bias), 1, all.shape.vocab, d_bias_, all.stream);
}

}  // namespace logitless::cuda

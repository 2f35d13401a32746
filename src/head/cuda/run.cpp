#include "head/cuda/run.h"

#include "core/check.h"
#include "head/cuda/views.h"
#include "kernels/device/shard.h"

namespace logitless::cuda {

Run::Run(const HeadCall& of)
    : call(of),
      kernel(find_device_kernel(of.plan->kernel)),
      features(of.shard.gathered != nullptr ? features_of_slices(of.features) : of.features),
      layout(LossPlanAccess::layout<Layout>(*of.plan)),
      sizes(layout.sizes),
      base_(static_cast<std::byte*>(of.workspace->data())),
      exchange_(base_) {
  if (call.shard.comm_stream != nullptr && call.shard.comm_stream->memory != nullptr)
    exchange_ = static_cast<std::byte*>(call.shard.comm_stream->memory) - layout.exchange;
  require_fit();
  const HeadOperands& in = call.in;
  all.shape = forward_shape(call.shape, features);
  all.logit_scale = features.logit_scale;
  all.softcap = features.softcap;
  all.stream = call.context->stream();
  all.bad_target = &statistics()->bad_target;
  all.workspace = at<std::byte>(layout.forward);
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
  if (sharded()) bind_vocab();
}

void Run::require_fit() const {
  const HeadShape& made = call.plan->shape;
  const HeadShape& shape = call.shape;
  require(made.dim == shape.dim && made.vocab == shape.vocab && made.dtype == shape.dtype &&
              shape.tokens <= made.tokens,
          "plan: made for ", made.tokens, " tokens x ", made.vocab, " vocabulary entries x ",
          made.dim, ", called with ", shape.tokens, " x ", shape.vocab, " x ", shape.dim);
  require(
      call.plan->weight_ranges == 0 || !features.d_weight_strided,
      "d_weight: expected rows that follow one another, since the plan keeps exp(z) there; plan "
      "from the tensors themselves");
  require(serves(*call.plan, call.features),
          "plan: made for other options, inputs or outputs than this call's; plan again with the "
          "same arguments");
  // The audit's plan has its own workspace behind this one's.
  require(call.workspace->bytes() >= call.plan->workspace_bytes(),
          "workspace: ", call.workspace->bytes(), " bytes, the plan needs ",
          call.plan->workspace_bytes());
  require(reinterpret_cast<std::uintptr_t>(base_) % 256 == 0,
          "workspace: expected an address aligned to 256 bytes");
}

// Sets the entries of the local shard.
void Run::bind_vocab() {
  all.global_vocab = call.shape.global_vocab;
  if (gathered()) return;  // each block sets its own vocabulary entries
  const VocabShard& vocab = call.shard.vocab;
  all.vocab_begin = vocab.rows() > 0 ? vocab.vocab_id(0) : 0;
  all.vocab_ids = static_cast<const std::int32_t*>(call.shard.comm_stream->vocab_ids.get());
  if (all.logit_weights == nullptr) return;
  if (all.vocab_ids == nullptr) {
    all.logit_weights += all.vocab_begin;
  } else {
    auto* const of_rows = at<float>(layout.shard.logit_weights);
    take_vocab(all.logit_weights, all.vocab_ids, vocab.rows(), of_rows, all.stream);
    all.logit_weights = of_rows;
  }
}

void Run::bind_gradients() {
  const auto output = [&](std::string_view name, const TensorView& view, bool matrix) {
    GradientOutput out;
    if (!view.defined()) return out;
    if (!matrix) require_contiguous(name, view);
    out.data = view.data();
    out.stride = matrix ? rows_of(name, view).row_stride : view.numel();
    out.dtype = view.dtype();
    out.add = call.features.accumulate;
    return out;
  };
  d_hidden = output("d_hidden", call.gradients.d_hidden, true);
  d_weight = output("d_weight", call.gradients.d_weight, true);
  d_bias = output("d_bias", call.gradients.d_bias, false);
}

void Run::bind_outputs() {
  const TokenOutputs& out = call.out;
  all.lse = floats_of("lse", out.lse);
  all.log_prob = floats_of("log_prob", out.log_prob);
  all.target_logit = floats_of("target_logit", out.target_logit);
  all.entropy = floats_of("entropy", out.entropy);
  all.weighted_sum = floats_of("weighted_logit_sum", out.weighted_sum);
  if (out.argmax.defined()) {
    require_contiguous("argmax", out.argmax);
    if (out.argmax.dtype() == DType::i64) {
      int64_argmax = static_cast<std::int64_t*>(out.argmax.data());
    } else {
      all.argmax = static_cast<std::int32_t*>(out.argmax.data());
    }
  }
  d_hidden_bound = floats_of("d_hidden_bound", call.far.d_hidden_bound);
}

RowCoefficients* Run::coefficients(std::int64_t first) const {
  if (!wants_gradients()) return nullptr;
  return at<RowCoefficients>(layout.gradients.rows) + chunk_index(first) * sizes.chunk;
}
float* Run::delta(std::int64_t first) const {
  if (!wants_gradients()) return nullptr;
  return at<float>(layout.gradients.delta) +
         chunk_index(first) * sizes.chunk * features.targets_per_token;
}

ForwardCall Run::chunk_call(const ForwardCall& of, std::int64_t first, std::int64_t count) const {
  ForwardCall c = of;
  const std::int64_t slot = first * c.shape.targets_per_token;
  c.shape.tokens = count;
  c.first_token = first;
  if (widens_hidden(features)) {
    c.hidden = at<float>(layout.wide_hidden);
    c.hidden_stride = c.shape.dim;
  } else {
    c.hidden = advance(c.hidden, first * c.hidden_stride, c.shape.dtype);
  }
  const auto place = [&](float* output, std::int64_t offset, std::size_t own, bool needed = true) {
    return output != nullptr ? output + offset : needed ? at<float>(own) : nullptr;
  };
  const std::int64_t before = chunk_index(first) * sizes.chunk;  // tokens in the workspace
  const auto saved = [&](float* output, std::int64_t offset, std::size_t own, std::int64_t each,
                         bool needed = true) {
    float* const to = place(output, offset, own, needed);
    return output == nullptr && to != nullptr ? to + before * each : to;
  };
  c.lse = saved(c.lse, first, layout.lse, 1);
  if (wants_gradients()) c.lse_rest = saved(nullptr, first, layout.lse_rest, 1);
  c.log_prob = saved(c.log_prob, slot, layout.log_prob, c.shape.targets_per_token);
  c.target_logit = saved(c.target_logit, slot, layout.target_logit, c.shape.targets_per_token,
                         wants_gradients() || layout.list.wanted);
  c.weighted_sum = place(c.weighted_sum, first, layout.weighted_sum, c.shape.weighted_sum);
  c.entropy = place(c.entropy, first, layout.entropy, c.shape.entropy);
  if (c.shape.argmax)
    c.argmax = c.argmax != nullptr ? c.argmax + first : at<std::int32_t>(layout.argmax);
  if (!wants_gradients()) return c;
  c.stored_vocab = sizes.stored;
  c.block = {at<std::byte>(layout.gradients.block), padded_vocab(sizes.vocab_block)};
  if (first == 0) c.ranges = aliased_ranges();
  c.reference = at<float>(layout.gradients.reference);
  c.active = at<int>(layout.gradients.active) +
             chunk_index(first) * (padded_tokens(sizes.chunk) / kBlockPadding + 1);
  return c;
}

ForwardCall Run::call_by_rows(const std::int32_t* rows, std::int64_t first,
                              std::int64_t count) const {
  ForwardCall of = all;
  of.rows = rows;
  of.lse = of.log_prob = of.target_logit = of.entropy = of.weighted_sum = nullptr;
  of.argmax = nullptr;
  return chunk_call(of, first, count);
}

void Run::widen_hidden(const ForwardCall& chunk) const {
  if (!widens_hidden(features)) return;
  const DType dtype = features.narrow_hidden;
  widen_rows(advance(all.hidden, chunk.first_token * all.hidden_stride, dtype), dtype,
             all.hidden_stride, chunk.shape.tokens, chunk.shape.dim, at<float>(layout.wide_hidden),
             chunk.stream);
}

VocabRanges Run::aliased_ranges() const {
  VocabRanges ranges = layout.ranges.ranges;
  for (int r = 0; r + 1 < ranges.count; ++r) {
    const AliasedRanges::Place& place = layout.ranges.places[r];
    ranges.data[r] = place.low
                         ? at<std::byte>(layout.gradients.weight_low) +
                               running_sum_bytes(place.row, all.shape.dim)
                         : advance(d_weight.data, place.row * d_weight.stride, d_weight.dtype);
  }
  if (ranges.count > 0) ranges.data[ranges.count - 1] = at<std::byte>(layout.gradients.block);
  return ranges;
}

void Run::clear_weights() const {
  if (features.accumulate) return;
  for (const auto& [out, rows] :
       {std::pair{&d_weight, all.shape.vocab}, std::pair{&d_bias, std::int64_t{1}}}) {
    if (out->data != nullptr)
      zero_gradient(*out, rows, out == &d_bias ? all.shape.vocab : all.shape.dim, all.stream);
  }
}

}  // namespace logitless::cuda

#include "head/device_engine.h"

#include <algorithm>

#include "core/check.h"

namespace logitless {
namespace {

void require_contiguous(std::string_view name, const ConstTensorView& view) {
  require(!view.defined() || view.contiguous(), name, ": ", describe(view),
          " is not contiguous; on a GPU it must be");
}

// Byte offset of a row, in elements of the dtype.
template <typename Pointer>
Pointer advance(Pointer data, std::int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte,
                                  std::byte>;
  return static_cast<Byte*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}

}  // namespace

RowMatrix device_rows(std::string_view name, const ConstTensorView& view) {
  RowMatrix m = as_rows(name, view);
  require(m.column_stride == 1 || m.columns == 1, name,
          ": expected contiguous rows on a GPU, got a stride of ", m.column_stride,
          " between columns");
  if (m.rows <= 1) m.row_stride = m.columns;
  return m;
}

const float* device_floats(std::string_view name, const ConstTensorView& view) {
  if (!view.defined()) return nullptr;
  require(view.dtype() == DType::f32, name, ": expected f32 on a GPU, got ", name_of(view.dtype()));
  require_contiguous(name, view);
  return static_cast<const float*>(view.data());
}
float* device_floats(std::string_view name, const TensorView& view) {
  device_floats(name, ConstTensorView(view));
  return view.defined() ? static_cast<float*>(view.data()) : nullptr;
}

DeviceEngine::DeviceEngine(const Context& context, const LossPlan& plan, const HeadShape& shape,
                           const HeadFeatures& features, const Workspace& workspace)
    : kernel_(cuda::find_device_kernel(plan.kernel)),
      features_(features),
      sizes_(device_sizes(plan)),
      layout_(layout_device(kernel_, plan.shape, plan.features, sizes_)),
      layout_tokens_(plan.shape.tokens),
      base_(static_cast<std::byte*>(workspace.data())),
      sample_every_(plan.sample_every) {
  require(plan.shape.dim == shape.dim && plan.shape.vocab == shape.vocab &&
              plan.shape.dtype == shape.dtype && shape.tokens <= plan.shape.tokens,
          "plan: made for ", plan.shape.tokens, " tokens x ", plan.shape.vocab, " words x ",
          plan.shape.dim, ", called with ", shape.tokens, " x ", shape.vocab, " x ", shape.dim);
  require(plan.features == features,
          "plan: made for other options, inputs or outputs than this call's; plan again with the "
          "same arguments");
  require(workspace.bytes() >= layout_.total, "workspace: ", workspace.bytes(),
          " bytes, the plan needs ", layout_.total);
  require(reinterpret_cast<std::uintptr_t>(base_) % 256 == 0,
          "workspace: expected an address aligned to 256 bytes");
  all.shape = forward_shape(shape, features);
  all.logit_scale = features.logit_scale;
  all.softcap = features.softcap;
  all.stream = context.stream();
  all.bad_target = &statistics()->bad_target;
  all.workspace = base_ + layout_.forward;
  cuda::ForwardShape chunk = forward_shape(plan.shape, plan.features);
  chunk.tokens = std::min(sizes_.chunk, std::max<std::int64_t>(plan.shape.tokens, 1));
  forward_bytes_ = kernel_.workspace_bytes(chunk);
  far_.tau = plan.tau;
}

cuda::DeviceStatistics* DeviceEngine::statistics() const {
  return at<cuda::DeviceStatistics>(layout_.statistics);
}
void* DeviceEngine::loss_workspace() const { return base_ + layout_.loss; }

void DeviceEngine::set_matrices(const ConstTensorView& hidden, const ConstTensorView& weight) {
  all.hidden = hidden.data();
  all.hidden_stride = device_rows("hidden", hidden).row_stride;
  all.weight = weight.data();
  all.weight_stride = device_rows("weight", weight).row_stride;
}

void DeviceEngine::set_targets(const ConstTensorView& targets, std::int64_t ignore_index) {
  require_contiguous("targets", targets);
  all.targets = targets.data();
  all.wide_targets = targets.dtype() == DType::i64;
  all.ignore_index = ignore_index;
}

std::int64_t* DeviceEngine::set_argmax(const TensorView& view) {
  if (!view.defined()) return nullptr;
  require_contiguous("argmax", view);
  if (view.dtype() == DType::i64) return static_cast<std::int64_t*>(view.data());
  all.argmax = static_cast<std::int32_t*>(view.data());
  return nullptr;
}

void DeviceEngine::set_gradients(const TensorView& d_hidden, const TensorView& d_weight,
                                 const TensorView& d_bias) {
  const auto output = [&](std::string_view name, const TensorView& view, bool matrix) {
    cuda::GradientOutput out;
    if (!view.defined()) return out;
    if (!matrix) require_contiguous(name, view);
    out.data = view.data();
    out.stride = matrix ? device_rows(name, view).row_stride : view.numel();
    out.dtype = view.dtype();
    out.add = features_.accumulate;
    return out;
  };
  d_hidden_ = output("d_hidden", d_hidden, true);
  d_weight_ = output("d_weight", d_weight, true);
  d_bias_ = output("d_bias", d_bias, false);
  round_hidden_ = sums_hidden(kernel_, all.shape.vocab, features_, sizes_);
  round_weight_ = sums_weight(kernel_, layout_tokens_, features_, sizes_);
}

cuda::ForwardCall DeviceEngine::chunk_call(std::int64_t first, std::int64_t count) const {
  cuda::ForwardCall c = all;
  const DType dtype = c.shape.dtype;
  const std::int64_t slot = first * c.shape.targets_per_token;
  c.shape.tokens = count;
  c.first_token = first;
  c.hidden = advance(c.hidden, first * c.hidden_stride, dtype);
  if (sizes_.far) order_chunk(c);
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
  c.stored_words = sizes_.stored;
  c.block = {base_ + layout_.block, cuda::padded_words(sizes_.slab)};
  c.reference = at<float>(layout_.reference);
  c.active = at<int>(layout_.active);
  return c;
}

void DeviceEngine::run(const ChunkFunction& tokens) {
  if (kernel_.prepare != nullptr) kernel_.prepare();
  const bool gradients = wants_gradients(features_);
  auto* const rows = gradients ? at<cuda::RowCoefficients>(layout_.rows) : nullptr;
  float* const delta = gradients ? at<float>(layout_.delta) : nullptr;
  const std::int64_t total = all.shape.tokens;
  std::int64_t first = 0;
  if (sizes_.far) begin_far();
  do {  // once even without tokens: outputs are still cleared
    const cuda::ForwardCall chunk =
        chunk_call(first, std::min(std::max<std::int64_t>(sizes_.chunk, 1), total - first));
    if (sizes_.far) cuda::gather_tokens(chunk, all.hidden, all.hidden_stride, hidden_rows());
    kernel_.forward(chunk);
    if (sizes_.both && features_.label_smoothing)
      cuda::estimate_weighted_sums(chunk, at<float>(layout_.weight_sum));
    tokens(chunk, rows, delta);
    if (sizes_.far) cuda::scatter_outputs(chunk, all);
    if (gradients && total > 0) {
      sizes_.far ? far_backward(chunk, first == 0) : backward(chunk, first == 0);
    }
    first += chunk.shape.tokens;
  } while (first < total);
  if (gradients && total > 0) round_weights();
  if (total == 0 && !features_.accumulate) {
    for (const auto& [out, rows_of] :
         {std::pair{&d_weight_, all.shape.vocab}, std::pair{&d_bias_, std::int64_t{1}}}) {
      if (out->data != nullptr)
        cuda::clear_gradient(*out, rows_of, out == &d_bias_ ? all.shape.vocab : all.shape.dim,
                             all.stream);
    }
  }
}

cuda::TargetOrder DeviceEngine::target_order() const {
  return {at<std::int32_t>(layout_.words), at<std::int32_t>(layout_.slots),
          at<std::int32_t>(layout_.places), at<std::int32_t>(layout_.counts)};
}
cuda::TargetEntries DeviceEngine::target_entries() const {
  return {at<std::int32_t>(layout_.entry_begin), at<std::int32_t>(layout_.entry_words),
          at<std::int32_t>(layout_.entry_tokens), at<float>(layout_.entry_values)};
}

cuda::BlockCall DeviceEngine::block_call(const cuda::ForwardCall& chunk) const {
  cuda::BlockCall b;
  b.chunk = chunk;
  b.rows = at<cuda::RowCoefficients>(layout_.rows);
  b.delta = at<float>(layout_.delta);
  b.block = chunk.block;
  b.factor = at<float>(layout_.factor);
  b.coefficient = at<float>(layout_.coefficient);
  b.entropy_part = features_.entropy_gradient;
  b.smoothing = features_.label_smoothing;
  b.smoothing_apart = smooths_apart(features_);
  return b;
}

void DeviceEngine::backward(const cuda::ForwardCall& chunk, bool first_chunk) {
  cuda::BlockCall b = block_call(chunk);
  cuda::order_targets(chunk, target_order());
  const std::int64_t vocab = chunk.shape.vocab;
  for (std::int64_t word = 0; word < vocab;) {
    b.first_word = word;
    b.from_forward = word < sizes_.stored;
    b.words = std::min(b.from_forward ? sizes_.stored : sizes_.slab, vocab - word);
    b.scaled_hidden =
        (b.from_forward || kernel_.keeps_logits) && scales_hidden(kernel_, features_, sizes_)
            ? base_ + layout_.scaled_hidden
            : nullptr;
    b.unscale = !b.from_forward && kernel_.block_unscale != nullptr ? kernel_.block_unscale(chunk)
                                                                    : nullptr;
    if (!b.from_forward) kernel_.gradient_block(b);
    cuda::prepare_block(b);
    cuda::list_targets(b, target_order(), target_entries());
    if (d_bias_.data != nullptr) sum_bias(b, first_chunk);
    products(b, first_chunk, word == 0);
    word += b.words;
  }
  round_chunk(chunk);
}

// What all products of a chunk share.
cuda::ProductsCall DeviceEngine::products_call(const cuda::ForwardCall& c) const {
  cuda::ProductsCall p;
  p.tokens = c.shape.tokens;
  p.dim = c.shape.dim;
  p.dtype = c.shape.dtype;
  p.factored_hidden = p.hidden = c.hidden;
  p.factored_stride = p.hidden_stride = c.hidden_stride;
  p.targets_per_token = c.shape.targets_per_token;
  p.words = target_order().words;
  p.coefficient = at<float>(layout_.coefficient);
  p.factor = at<float>(layout_.factor);
  p.rows = at<cuda::RowCoefficients>(layout_.rows);
  p.kernel_workspace = c.workspace;
  p.kernel_workspace_bytes = adds_entries(kernel_, layout_tokens_, features_, sizes_)
                                 ? layout_.many - layout_.forward
                                 : forward_bytes_;
  p.stream = c.stream;
  return p;
}

// sum_j omega_j w_j over rows of the weights, for d_hidden.
void DeviceEngine::sum_weights(const cuda::ForwardCall& c, const void* rows, std::int64_t count,
                               const float* omega) {
  cuda::ColumnSumCall sum;
  sum.dtype = c.shape.dtype;
  sum.columns = c.shape.dim;
  sum.workspace = base_ + layout_.column_sums;
  sum.stream = c.stream;
  sum.matrix = rows;
  sum.rows = count;
  sum.stride = c.weight_stride;
  sum.weights = omega;
  sum.out = at<float>(layout_.weight_sum);
  cuda::sum_columns(sum);
}

// sum_i gamma_i x_i, for d_weight.
void DeviceEngine::sum_hidden(const cuda::ForwardCall& c) {
  cuda::ColumnSumCall sum;
  sum.dtype = c.shape.dtype;
  sum.columns = c.shape.dim;
  sum.workspace = base_ + layout_.column_sums;
  sum.stream = c.stream;
  sum.matrix = c.hidden;
  sum.rows = c.shape.tokens;
  sum.stride = c.hidden_stride;
  sum.weights = &at<cuda::RowCoefficients>(layout_.rows)->gamma;
  sum.weight_stride = sizeof(cuda::RowCoefficients) / sizeof(float);
  sum.out = at<float>(layout_.hidden_sum);
  cuda::sum_columns(sum);
}

// Where products of the chunk's tokens go; what comes first overwrites, unless the call adds.
cuda::GradientOutput DeviceEngine::hidden_sums(const cuda::ForwardCall& c, bool first) const {
  if (round_hidden_) return {base_ + layout_.d_hidden, c.shape.dim, DType::f32, !first};
  cuda::GradientOutput out = d_hidden_;
  out.data = advance(d_hidden_.data, c.first_token * d_hidden_.stride, d_hidden_.dtype);
  out.add = features_.accumulate || !first;
  return out;
}
cuda::GradientOutput DeviceEngine::weight_sums(bool first_chunk) const {
  cuda::GradientOutput out = round_weight_ ? cuda::GradientOutput{base_ + layout_.d_weight,
                                                                  all.shape.dim, DType::f32, false}
                                           : d_weight_;
  out.add = (!round_weight_ && features_.accumulate) || !first_chunk;
  return out;
}

cuda::RunningSums DeviceEngine::running_sums(const cuda::BlockCall& block, bool first_chunk) const {
  cuda::RunningSums out;
  if (round_weight_ || d_weight_.dtype == DType::f32) return out;
  if (splits_weight(kernel_, layout_tokens_, features_, sizes_))
    out.low = at<std::uint8_t>(layout_.weight_low) +
              cuda::running_sum_bytes(block.first_word, all.shape.dim);
  out.from = !first_chunk           ? cuda::SumsFrom::sums
             : features_.accumulate ? cuda::SumsFrom::output
                                    : cuda::SumsFrom::nothing;
  out.last = block.chunk.first_token + block.chunk.shape.tokens == all.shape.tokens;
  return out;
}

void DeviceEngine::add_many_entries(cuda::ProductsCall& p) const {
  if (!adds_entries(kernel_, layout_tokens_, features_, sizes_)) return;
  cuda::sum_many_entries(p, at<float>(layout_.many));
  p.many = at<float>(layout_.many);
}

void DeviceEngine::products(const cuda::BlockCall& block, bool first_chunk, bool first_slab) {
  const cuda::ForwardCall& c = block.chunk;
  const DType dtype = c.shape.dtype;
  cuda::ProductsCall p = products_call(c);
  p.block_words = block.words;
  p.block = block.block;
  p.weight = advance(c.weight, block.first_word * c.weight_stride, dtype);
  p.weight_stride = c.weight_stride;
  if (block.scaled_hidden != nullptr) {
    p.factored_hidden = block.scaled_hidden;
    p.factored_stride = c.shape.dim;
  }
  p.first_word = static_cast<std::int32_t>(block.first_word);
  p.entries = target_entries();
  p.active = kernel_.keeps_logits ? nullptr : c.active;
  if (smooths_apart(features_)) {
    const float* const omega = c.omega == nullptr ? nullptr : c.omega + block.first_word;
    p.omega = omega;
    if (d_hidden_.data != nullptr) {
      p.weight_sum = at<float>(layout_.weight_sum);
      if (first_chunk || sizes_.slab < c.shape.vocab)  // else still there
        sum_weights(c, p.weight, p.block_words, omega);
    }
    if (d_weight_.data != nullptr) {
      p.hidden_sum = at<float>(layout_.hidden_sum);
      sum_hidden(c);
    }
  }
  if (d_hidden_.data != nullptr) p.d_hidden = hidden_sums(c, first_slab);
  if (d_weight_.data != nullptr) {
    p.d_weight = weight_sums(first_chunk);
    p.d_weight.data =
        advance(p.d_weight.data, block.first_word * p.d_weight.stride, p.d_weight.dtype);
    p.running = running_sums(block, first_chunk);
    add_many_entries(p);
  }
  kernel_.gradient_products(p);
}

void DeviceEngine::sum_bias(const cuda::BlockCall& block, bool first_chunk) {
  const cuda::ForwardCall& c = block.chunk;
  float* const sums = at<float>(layout_.d_bias) + block.first_word;
  cuda::ColumnSumCall sum;
  sum.matrix = block.block.data;
  sum.dtype = c.shape.dtype;
  sum.rows = c.shape.tokens;
  sum.columns = block.words;
  sum.stride = block.block.stride;
  sum.weights = block.factor;
  sum.out = sums;
  sum.add = !first_chunk;
  sum.workspace = base_ + layout_.column_sums;
  sum.stream = c.stream;
  cuda::sum_columns(sum);
  add_bias_parts(block, sums);
}

// The targets' and the smoothing's part of d_bias.
void DeviceEngine::add_bias_parts(const cuda::BlockCall& block, float* sums) const {
  const cuda::ForwardCall& c = block.chunk;
  cuda::add_bias_targets(target_entries(), block.words, sums, c.stream);
  if (smooths_apart(features_)) {
    cuda::add_bias_smoothing(block.rows, c.shape.tokens,
                             c.omega == nullptr ? nullptr : c.omega + block.first_word, block.words,
                             sums, c.stream);
  }
}

void DeviceEngine::round_chunk(const cuda::ForwardCall& chunk) {
  if (!round_hidden_) return;
  cuda::GradientOutput out = d_hidden_;
  const std::int32_t* const to = sizes_.far ? chunk.rows + chunk.first_token : nullptr;
  if (to == nullptr) out.data = advance(out.data, chunk.first_token * out.stride, out.dtype);
  cuda::round_sums(at<float>(layout_.d_hidden), chunk.shape.tokens, chunk.shape.dim, out,
                   chunk.stream, to);
}

void DeviceEngine::round_weights() {
  if (round_weight_) {
    cuda::round_sums(at<float>(layout_.d_weight), all.shape.vocab, all.shape.dim, d_weight_,
                     all.stream);
  }
  if (d_bias_.data != nullptr)
    cuda::round_sums(at<float>(layout_.d_bias), 1, all.shape.vocab, d_bias_, all.stream);
}

}  // namespace logitless

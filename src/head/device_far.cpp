// The far field's part of the engine on a GPU: the backward of a chunk by its tile masses.
//
// far:  the masses of all tiles that are not kept are one block, 128 times thinner than the
//       vocabulary, and the centroids its words.
// near: slabs of words by position; their gradients where they are kept, and their products.
#include <algorithm>
#include <array>

#include "core/check.h"
#include "head/device_engine.h"
#include "head/device_order.h"
#include "head/far_field.h"

namespace logitless {

void DeviceEngine::set_far(const VocabOrder& order, float* bound, std::uint64_t sample_seed) {
  bound_output_ = bound;
  sample_seed_ = sample_seed;
  if (!sizes_.far) return;
  require(!order.empty(), "order: a far-field plan needs one (make_vocab_order), got none");
  require(order.vocab() == all.shape.vocab, "order: made for ", order.vocab(),
          " words, the call has ", all.shape.vocab);
  far_.order = device_order(order);
  far_.most_kept = static_cast<float>(kMostKept);
  far_.slab_words = sizes_.slab;
  far_.gathered = base_ + layout_.gathered;
  if (all.bias != nullptr) far_.bias = at<float>(layout_.bias);
  if (all.omega != nullptr) far_.omega = at<float>(layout_.omega);
  far_.mass = at<float>(layout_.mass);
  far_.tokens = {all.hidden,
                 all.hidden_stride,
                 hidden_rows(),
                 token_order().slots,
                 {at<std::int32_t>(layout_.chunk_keys), at<std::int32_t>(layout_.chunk_rows),
                  at<std::int32_t>(layout_.chunk_places), at<std::int32_t>(layout_.chunk_counts)}};
  far_.centroid = base_ + layout_.centroid;
  far_.radius = at<float>(layout_.radius);
  far_.distance = at<float>(layout_.distance);
  far_.block_groups = at<std::uint32_t>(layout_.block_groups);
  far_.group_blocks = at<std::uint32_t>(layout_.group_blocks);
  far_.list = at<std::uint32_t>(layout_.list);
  far_.list_begin = at<std::int32_t>(layout_.list_begin);
  far_.sums = at<cuda::FarSums>(layout_.far_sums);
  if (sizes_.both) set_estimate(order);
}

void DeviceEngine::set_estimate(const VocabOrder& order) {
  require(order.dim() == all.shape.dim,
          "order: plan far_both needs the moments of its tiles (measure_tiles) of dim ",
          all.shape.dim,
          order.has_moments() ? concat(", got some of ", order.dim()) : ", got none");
  require(bound_output_ == nullptr,
          "d_hidden_bound: plan far_both has none; its audit measures the error");
  cuda::prepare_estimates();
  estimate_.moments = device_moments(order);
  estimate_.word_weight = at<float>(layout_.word_weight);
  estimate_.log2_base = at<float>(layout_.log2_base);
  estimate_.mean = base_ + layout_.mean;
  estimate_.along = at<float>(layout_.along);
  estimate_.squares = base_ + layout_.squares;
  estimate_.forms = at<float>(layout_.forms);
  estimate_.total = at<float>(layout_.total_mass);
  estimate_.far_sum = at<float>(layout_.far_sum);
  estimate_.constants = at<float>(layout_.constants);
  estimate_.products = base_ + layout_.products;
  far_.estimate = &estimate_;
}

// What is of all tokens: their order, and sum_j omega_j w_j.
void DeviceEngine::begin_far() {
  if (all.shape.tokens == 0) {
    cuda::fill_device(far_.sums, 0, sizeof(cuda::FarSums), all.stream);
    return;
  }
  cuda::order_tokens(all, far_.order, token_order());
  if (smooths_apart(features_) && (d_hidden_.data != nullptr || sizes_.both))
    sum_weights(all, all.weight, all.shape.vocab, all.omega);
}

cuda::TargetOrder DeviceEngine::token_order() const {
  return {at<std::int32_t>(layout_.token_keys), at<std::int32_t>(layout_.token_rows),
          at<std::int32_t>(layout_.token_places), at<std::int32_t>(layout_.token_counts)};
}

// Tokens in the order of blocks: everything of the chunk is in that order, and its outputs are the
// workspace's until they are scattered.
void DeviceEngine::order_chunk(cuda::ForwardCall& c) const {
  c.far = &far_;
  c.rows = at<std::int32_t>(layout_.token_rows);
  c.hidden = hidden_rows();
  c.hidden_stride = c.shape.dim;
  c.lse = c.log_prob = c.target_logit = c.entropy = nullptr;
  c.argmax = nullptr;
}

// Tokens by the tiles they keep, with what the backward reads of them.
void DeviceEngine::sort_chunk(const cuda::ForwardCall& c) const {
  const std::int64_t per_token = c.shape.targets_per_token;
  constexpr std::int64_t kCoefficients = sizeof(cuda::RowCoefficients) / sizeof(float);
  const auto each = [&](void* data, std::int64_t count) {
    return cuda::TokenValues{data, count, 1, count};
  };
  auto* const rows = at<cuda::RowCoefficients>(layout_.rows);
  cuda::sort_tokens(
      c, rows,
      std::array{each(c.lse, 1), each(c.log_prob, per_token), each(c.target_logit, per_token),
                 each(rows, kCoefficients), each(at<float>(layout_.delta), per_token)});
}

void DeviceEngine::far_backward(const cuda::ForwardCall& chunk, bool first_chunk) {
  const std::int64_t vocab = chunk.shape.vocab;
  cuda::BlockCall b = block_call(chunk);
  b.block = {};
  b.words = vocab;
  if (!sizes_.both) sort_chunk(chunk);  // or the forward has
  cuda::order_targets(chunk, target_order());
  cuda::prepare_block(b);
  cuda::list_targets(b, target_order(), target_entries());
  if (d_weight_.data != nullptr || d_bias_.data != nullptr)
    far_.sample = FarSample(sample_every_, sample_seed_, chunk.first_token);
  if (!sizes_.both) {
    cuda::select_tiles(chunk, b.rows, first_chunk);
  } else if (far_.sample.every > 0) {  // the forward has chosen
    cuda::sample_tiles(chunk);
  }
  const cuda::LogitBlock masses{base_ + layout_.far_block,
                                cuda::padded_words(cuda::far_tiles(vocab))};
  far_products(b, masses);
  cuda::ProductsCall targets = products_call(chunk);
  targets.block_words = vocab;
  targets.entries = target_entries();
  add_many_entries(targets);
  b.block = chunk.block;
  for (cuda::FarSlab slab; slab.first < vocab; slab.first += slab.words) {
    slab.words = std::min(far_.slab_words, vocab - slab.first);
    b.first_word = slab.first;
    b.words = slab.words;
    // The weights' tiles are the same for all chunks; estimates have no bound.
    const bool radii = first_chunk && !sizes_.both;
    b.weight_rows = cuda::gather_slab(
        chunk, slab, radii ? cuda::GatherPart::radii : cuda::GatherPart::rows, nullptr);
    kernel_.gradient_block(b);
    cuda::clear_targets(b);
    if (d_bias_.data != nullptr)
      cuda::far_bias(b, at<float>(layout_.tile_sum), !first_chunk, at<float>(layout_.d_bias));
    near_products(b, first_chunk);
  }
  b.first_word = 0;
  b.words = vocab;
  if (d_bias_.data != nullptr) add_bias_parts(b, at<float>(layout_.d_bias));
  if (d_weight_.data != nullptr) {
    targets.d_weight = weight_sums(first_chunk);
    if (targets.d_weight.dtype == DType::f32) cuda::add_weight_targets(targets);
  }
  float* const bound = sizes_.both ? nullptr : at<float>(layout_.bound);
  if (bound != nullptr) cuda::far_bounds(b, masses, bound);
  const cuda::GradientOutput d_hidden =
      d_hidden_.data == nullptr ? d_hidden_ : hidden_sums(chunk, true);
  if (sizes_.audited > 0) {
    if (first_chunk) cuda::count_audited(all, far_audit());
    cuda::keep_audited(chunk, far_audit(), d_hidden);
  }
  cuda::finish_far(chunk, d_hidden, bound, bound_output_, at<double>(layout_.far_partial));
  round_chunk(chunk);
}

cuda::FarAudit DeviceEngine::far_audit() const {
  cuda::FarAudit a;
  a.tokens = std::min(sizes_.audited, all.shape.tokens);
  a.order = token_order().slots;
  a.valid = at<std::int32_t>(layout_.audit_valid);
  a.rows = at<std::int32_t>(layout_.audit_rows);
  a.d_hidden = at<float>(layout_.audit_hidden);
  a.lse = at<float>(layout_.audit_lse);
  a.partial = at<double>(layout_.audit_partial);
  return a;
}

void DeviceEngine::audit(const Context& context, const LossPlan& plan, const Workspace& workspace,
                         const ChunkFunction& tokens) const {
  const cuda::FarAudit a = far_audit();
  if (sizes_.audited == 0 || a.tokens == 0) return;
  HeadShape shape = plan.shape;
  shape.tokens = a.tokens;
  const Workspace rest(static_cast<std::byte*>(workspace.data()) + layout_.total,
                       plan.audit->workspace_bytes());
  DeviceEngine exact(context, *plan.audit, shape, plan.audit->features, rest);
  const cuda::ForwardCall own = exact.all;
  exact.all = all;
  exact.all.shape = own.shape;
  exact.all.bad_target = own.bad_target;
  exact.all.workspace = own.workspace;
  exact.all.rows = a.rows;
  cuda::list_audited(a, all.stream);
  cuda::gather_tokens(exact.all, all.hidden, all.hidden_stride, base_ + layout_.audit_tokens);
  exact.all.hidden = base_ + layout_.audit_tokens;
  exact.all.hidden_stride = shape.dim;
  exact.all.log_prob = exact.all.target_logit = exact.all.entropy = nullptr;
  exact.all.argmax = nullptr;
  exact.all.lse = at<float>(layout_.audit_exact_lse);
  exact.d_hidden_ = {base_ + layout_.audit_exact, shape.dim, DType::f32, false};
  exact.run(tokens);
  cuda::compare_audited(exact.all, a, at<float>(layout_.audit_exact), far_.sums);
}

// The far tiles' part of d_hidden, with what is of all words: targets and smoothing; and the
// gradient of each tile as one point.
void DeviceEngine::far_products(const cuda::BlockCall& block, const cuda::LogitBlock& masses) {
  const cuda::ForwardCall& c = block.chunk;
  const std::int64_t tiles = cuda::far_tiles(c.shape.vocab);
  const bool sampled = far_.sample.every > 0;
  cuda::far_block(block, masses, sampled ? cuda::FarBlockFor::words : cuda::FarBlockFor::tokens);
  if (d_bias_.data != nullptr) {
    cuda::ColumnSumCall sum;
    sum.dtype = c.shape.dtype;
    sum.matrix = masses.data;
    sum.rows = c.shape.tokens;
    sum.columns = tiles;
    sum.stride = masses.stride;
    sum.out = at<float>(layout_.tile_sum);
    sum.workspace = base_ + layout_.column_sums;
    sum.stream = c.stream;
    cuda::sum_columns(sum);
  }
  cuda::ProductsCall p = products_call(c);
  p.block = masses;
  p.block_words = tiles;
  p.weight = far_.centroid;
  p.weight_stride = c.shape.dim;
  p.target_weight = c.weight;
  p.target_stride = c.weight_stride;
  p.active = c.active;
  if (d_weight_.data != nullptr)
    p.d_weight = {base_ + layout_.tile_gradient, c.shape.dim, DType::f32, false};
  if (sampled) {
    if (d_weight_.data != nullptr) kernel_.gradient_products(p);
    p.d_weight = {};
    cuda::far_block(block, masses, cuda::FarBlockFor::tokens);
  }
  if (d_hidden_.data != nullptr) {
    p.d_hidden = hidden_sums(c, true);
    if (smooths_apart(features_)) p.weight_sum = at<float>(layout_.weight_sum);
  }
  if (p.d_hidden.data != nullptr || p.d_weight.data != nullptr) kernel_.gradient_products(p);
  if (d_weight_.data != nullptr && smooths_apart(features_)) sum_hidden(c);
}

void DeviceEngine::near_products(const cuda::BlockCall& block, bool first_chunk) {
  const cuda::ForwardCall& c = block.chunk;
  cuda::ProductsCall p = products_call(c);
  p.targets_per_token = 0;  // far_products has them
  p.block = block.block;
  p.block_words = block.words;
  p.weight = block.weight_rows;
  p.weight_stride = far_.order.identity ? c.weight_stride : c.shape.dim;
  p.far = &far_;
  p.vocab = c.shape.vocab;
  p.first_position = block.first_word;
  if (d_hidden_.data != nullptr) p.d_hidden = hidden_sums(c, false);
  if (d_weight_.data != nullptr) {
    p.d_weight = weight_sums(first_chunk);
    p.entries = target_entries();
    p.many = at<float>(layout_.many);
    p.tile_gradient = at<float>(layout_.tile_gradient);
    if (smooths_apart(features_)) {
      p.hidden_sum = at<float>(layout_.hidden_sum);
      p.omega = far_.omega == nullptr ? nullptr : far_.omega + block.first_word;
    }
  }
  kernel_.gradient_products(p);
}

}  // namespace logitless

// The far field's part of the engine on a GPU: the backward of a chunk by its tile masses.
//
// far:  the masses of all skipped tiles form one block, 128 times thinner than the vocabulary,
// whose rows of weight are the centroids.
// near: vocabulary blocks by position, with the gradients of selected tiles and their GEMMs.
#include <algorithm>
#include <array>

#include "core/check.h"
#include "head/cuda/engine.h"
#include "head/cuda/order.h"
#include "head/cuda/views.h"
#include "head/far_work.h"

namespace logitless::cuda {

void Engine::set_far() {
  bound_output_ = floats_of("d_hidden_bound", call_.far.d_hidden_bound);
  if (!sizes_.far) return;
  require(call_.far.order != nullptr && !call_.far.order->empty(),
          "order: a far-field plan needs one (make_vocab_order), got none");
  const VocabOrder& order = *call_.far.order;
  const std::int64_t vocab_count = sharded() ? call_.shard.vocab.rows() : all.shape.vocab;
  require(order.vocab() == vocab_count, "order: made for ", order.vocab(),
          " vocabulary entries, the call has ", vocab_count);
  if (sharded()) {
    require(static_cast<std::int64_t>(order.places().size()) == all.global_vocab,
            "order: expected one of share_order, with the places of the ", all.global_vocab,
            " vocabulary of all ranks, got ",
            order.places().empty() ? std::string("one without places")
                                   : concat("places of ", order.places().size()));
    far_.reports_fallback =
        holds_its_part(far_tile_count(vocab_count), call_.shard.tiles, call_.shard.ranks());
  }
  order_ = device_order(order);
  if (!sharded()) order_.places = nullptr;
  far_.arranged = {at<std::int32_t>(layout_.far.groups),
                   at<std::int32_t>(layout_.far.arranged_vocab),
                   at<std::int32_t>(layout_.far.arranged_positions),
                   at<float>(layout_.far.arranged_share), base_ + layout_.far.arranged_centroid};
  use_own_order();
  far_.most_selected = static_cast<float>(kMaxSelected);
  far_.block_vocab_count = sizes_.vocab_block;
  far_.swept_vocab = layout_.far.swept;
  far_.gathered = base_ + layout_.far.gathered;
  if (all.bias != nullptr) far_.bias = at<float>(layout_.far.bias);
  if (all.logit_weights != nullptr) far_.logit_weights = at<float>(layout_.far.logit_weights);
  far_.mass = at<float>(layout_.far.mass);
  far_.tokens = {
      all.hidden,
      all.hidden_stride,
      hidden_rows(),
      token_order().slots,
      {at<std::int32_t>(layout_.far.chunk_keys), at<std::int32_t>(layout_.far.chunk_rows),
       at<std::int32_t>(layout_.far.chunk_positions), at<std::int32_t>(layout_.far.chunk_counts)}};
  far_.radius = at<float>(layout_.far.radius);
  far_.distance = at<float>(layout_.far.distance);
  far_.block_groups = at<std::uint32_t>(layout_.far.block_groups);
  far_.group_blocks = at<std::uint32_t>(layout_.far.group_blocks);
  far_.list = at<std::uint32_t>(layout_.far.list);
  far_.list_begin = at<std::int32_t>(layout_.far.list_begin);
  far_.sums = at<FarSums>(layout_.far.sums);
  if (sizes_.both) set_estimate(order);
}

void Engine::set_estimate(const VocabOrder& order) {
  require(order.dim() == all.shape.dim || (sharded() && empty_shard()),
          "order: plan far_both needs the moments of its tiles (measure_tiles) of dim ",
          all.shape.dim,
          order.has_moments() ? concat(", got some of ", order.dim()) : ", got none");
  require(bound_output_ == nullptr,
          "d_hidden_bound: plan far_both has none; its audit measures the error");
  prepare_estimates();
  if (order.has_moments()) estimate_.moments = device_moments(order);
  estimate_.target_weight_sum = at<float>(layout_.estimates.target_weight_sum);
  estimate_.log2_base = at<float>(layout_.estimates.log2_base);
  estimate_.mean = base_ + layout_.estimates.mean;
  estimate_.along = at<float>(layout_.estimates.along);
  estimate_.squares = base_ + layout_.estimates.squares;
  estimate_.forms = at<float>(layout_.estimates.forms);
  estimate_.total = at<float>(layout_.estimates.total_mass);
  estimate_.far_sum = at<float>(layout_.estimates.far_sum);
  estimate_.constants = at<float>(layout_.estimates.constants);
  estimate_.products = base_ + layout_.estimates.products;
  far_.estimate = &estimate_;
}

// Uses the call's order, until a chunk's tiles are selected.
void Engine::use_own_order() {
  far_.order = order_;
  far_.centroid = base_ + layout_.far.centroid;
  far_.groups = nullptr;
}
// Uses the arranged order after the selection, see FarCall::groups.
void Engine::use_arranged_order(const ForwardCall& chunk) {
  const FarArrangement& to = far_.arranged;
  far_.groups = to.groups;
  if (order_.identity) return;
  far_.order.vocab_ids = to.vocab_ids;
  far_.order.positions = to.positions;
  far_.order.share = to.share;
  far_.centroid = to.centroid;
  gather_vectors(chunk);
}

// Computes data of all tokens: their order, and sum_j omega_j w_j.
void Engine::begin_far() {
  fill_device(far_.sums, 0, sizeof(FarSums), all.stream);
  if (all.shape.tokens == 0) return;
  order_tokens(all, order_, token_order());
  sum_all_weights();
}

void Engine::sum_all_weights() {
  if (smooths_apart(features_) && (wants_hidden() || sizes_.both))
    sum_weights(all, all.weight, all.shape.vocab, all.logit_weights);
}

// Runs the forward. far_both selects tiles by estimates and computes only those; far_backward
// computes all and selects by their masses.
void Engine::far_forward(const ForwardCall& c) {
  const FarForward& forward = *kernel_.far;
  use_own_order();
  gather_tokens(c, all.hidden, all.hidden_stride, hidden_rows());
  forward.begin(c);
  if (c.shape.tokens == 0) return;
  gather_vectors(c);
  if (!sizes_.both) return forward.all_tiles(c);
  if (c.first_token == 0) prepare_means(c);
  estimate_masses(c);
  forward_selected_tiles(c, forward.target_logits(c));
}

// Selects tiles by the estimates and their totals, and computes them. target_logits [tokens, K].
void Engine::forward_selected_tiles(const ForwardCall& c, float* target_logits) {
  const int per_token = c.shape.targets_per_token;
  sort_tokens(c, nullptr,
              std::array{TokenValues{estimate_.total, 1, 0, 1},
                         TokenValues{target_logits, per_token, 1, per_token}});
  select_estimated(c, target_logits);
  use_arranged_order(c);
  kernel_.far->selected_tiles(c);
  if (features_.label_smoothing) estimate_weighted_sums(c, at<float>(layout_.gradients.weight_sum));
}

TargetOrder Engine::token_order() const {
  return {at<std::int32_t>(layout_.far.token_keys), at<std::int32_t>(layout_.far.token_rows),
          at<std::int32_t>(layout_.far.token_positions),
          at<std::int32_t>(layout_.far.token_counts)};
}

// Sets the chunk's operands in the order of blocks. Its outputs are in the workspace until they are
// scattered.
void Engine::order_chunk(ForwardCall& c) const {
  c.far = &far_;
  c.rows = at<std::int32_t>(layout_.far.token_rows);
  c.hidden = hidden_rows();
  c.hidden_stride = c.shape.dim;
  c.lse = c.log_prob = c.target_logit = c.entropy = nullptr;
  c.argmax = nullptr;
}

// Sorts tokens by their selected tiles, with all per-token inputs of the backward.
void Engine::sort_chunk(const ForwardCall& c) const {
  const std::int64_t per_token = c.shape.targets_per_token;
  constexpr std::int64_t kCoefficients = sizeof(RowCoefficients) / sizeof(float);
  const auto each = [&](void* data, std::int64_t count) {
    return TokenValues{data, count, 1, count};
  };
  auto* const rows = at<RowCoefficients>(layout_.gradients.rows);
  sort_tokens(
      c, rows,
      std::array{each(c.lse, 1), each(c.log_prob, per_token), each(c.target_logit, per_token),
                 each(rows, kCoefficients), each(at<float>(layout_.gradients.delta), per_token)});
}

void Engine::far_backward(const ForwardCall& chunk, bool first_chunk) {
  const std::int64_t vocab = chunk.shape.vocab;
  BlockCall b = block_call(chunk);
  b.block = {};
  b.vocab_count = vocab;
  if (!sizes_.both) sort_chunk(chunk);  // far_both has sorted in the forward
  order_targets(chunk, target_order());
  prepare_block(b);
  list_targets(b, target_order(), target_entries());
  if (d_weight_.data != nullptr || d_bias_.data != nullptr)
    far_.sample = FarSample(call_.plan->sample_every, call_.far.sample_seed,
                            sharded() ? far_chunk_ : chunk.first_token);
  far_.sample.first_tile = call_.shard.first_tile;
  if (!sizes_.both) {
    select_tiles(chunk, b.rows);
    use_arranged_order(chunk);
  } else if (far_.sample.every > 0) {  // far_both has selected in the forward
    sample_tiles(chunk);
  }
  const LogitBlock masses{base_ + layout_.far.block, padded_vocab(far_tile_count(vocab))};
  far_gemms(b, masses);
  GradientGemmsCall targets = gemms_call(chunk);
  targets.block_vocab = vocab;
  targets.entries = target_entries();
  add_many_entries(targets);
  b.block = chunk.block;
  for (FarVocabBlock vocab_block; vocab_block.first < vocab;
       vocab_block.first += vocab_block.vocab_count) {
    vocab_block.vocab_count = std::min(far_.block_vocab_count, vocab - vocab_block.first);
    b.vocab_begin = vocab_block.first;
    b.vocab_count = vocab_block.vocab_count;
    // Tiles of the weights are the same for all chunks; estimates have no bound.
    const bool radii = first_chunk && !sizes_.both;
    b.weight_rows =
        gather_block(chunk, vocab_block, radii ? GatherPart::radii : GatherPart::rows, nullptr);
    kernel_.gradient_block(b);
    clear_targets(b);
    if (d_bias_.data != nullptr)
      far_bias(b, at<float>(layout_.far.tile_sum), !first_chunk,
               at<float>(layout_.gradients.d_bias));
    near_gemms(b, first_chunk);
  }
  if (d_weight_.data != nullptr) put_far_vocab(near_call(chunk, first_chunk, 0));
  if (samples_estimates(far_)) measure_sample(chunk, b.rows, at<double>(layout_.far.partial));
  b.vocab_begin = 0;
  b.vocab_count = vocab;
  if (d_bias_.data != nullptr) add_bias_parts(b, at<float>(layout_.gradients.d_bias));
  if (d_weight_.data != nullptr) {
    targets.d_weight = weight_sums(first_chunk);
    if (targets.d_weight.dtype == DType::f32) add_weight_targets(targets);
  }
  float* const bound = sizes_.both ? nullptr : at<float>(layout_.far.bound);
  if (bound != nullptr) far_bounds(b, masses, bound);
  if (sharded()) return;  // the remaining sums need the global vocabulary
  const GradientOutput d_hidden = d_hidden_.data == nullptr ? d_hidden_ : hidden_sums(chunk, true);
  if (sizes_.audited > 0) {
    if (first_chunk) count_audited(all, far_audit());
    keep_audited(chunk, far_audit(), d_hidden);
  }
  finish_far(chunk, d_hidden, bound, bound_output_, at<double>(layout_.far.partial));
  round_chunk(chunk);
}

FarAudit Engine::far_audit() const {
  FarAudit a;
  // With sharded tokens, each rank audits equally many.
  const std::int64_t wanted =
      call_.shard.tokens_sharded ? sizes_.audited / call_.shard.ranks() : sizes_.audited;
  a.tokens = std::min(wanted, all.shape.tokens);
  a.order = token_order().slots;
  a.valid = at<std::int32_t>(layout_.audit.valid);
  a.rows = at<std::int32_t>(layout_.audit.rows);
  a.d_hidden = at<float>(layout_.audit.hidden);
  a.lse = at<float>(layout_.audit.lse);
  a.partial = at<double>(layout_.audit.partial);
  return a;
}

// Makes the exact plan's engine for the audited tokens, which it gathers.
Engine::Engine(const HeadCall& call, const Engine& far, const FarAudit& audit)
    : Engine(call, OperandsAlone()) {
  const ForwardCall own = all;
  all = far.all;
  all.shape = own.shape;
  all.bad_target = own.bad_target;
  all.workspace = own.workspace;
  all.rows = audit.rows;
  list_audited(audit, all.stream);
  gather_tokens(all, far.all.hidden, far.all.hidden_stride, far.base_ + far.layout_.audit.tokens);
  all.hidden = far.base_ + far.layout_.audit.tokens;
  all.hidden_stride = all.shape.dim;
  all.log_prob = all.target_logit = all.entropy = nullptr;
  all.argmax = nullptr;
  all.lse = far.at<float>(far.layout_.audit.exact_lse);
  d_hidden_ = {far.base_ + far.layout_.audit.exact, all.shape.dim, DType::f32, false};
  round_hidden_ = sums_hidden(kernel_, all.shape.vocab, features_, sizes_);
}

void Engine::audit(const ChunkFunction& set_coefficients) const {
  const FarAudit a = far_audit();
  if (sizes_.audited == 0 || (a.tokens == 0 && !call_.shard.tokens_sharded)) return;
  const LossPlan& plan = *call_.plan->audit;
  const Workspace rest(base_ + (exchange_ == base_ ? layout_.total : layout_.exchange),
                       plan.workspace_bytes());
  HeadCall call = call_;
  call.plan = &plan;
  call.workspace = &rest;
  call.shape = call_.plan->shape;
  call.shape.tokens = a.tokens;
  call.features = plan.features;
  Engine exact(call, *this, a);
  exact.run(set_coefficients);
  compare_audited(exact.all, a, at<float>(layout_.audit.exact), far_.sums);
}

// Computes the skipped tiles' part of d_hidden, including targets and smoothing of the full
// vocabulary, and the gradient of each tile's centroid.
void Engine::far_gemms(const BlockCall& block, const LogitBlock& masses) {
  const ForwardCall& c = block.chunk;
  const std::int64_t tiles = far_tile_count(c.shape.vocab);
  const bool sampled = far_.sample.every > 0;
  far_block(block, masses, sampled ? FarBlockFor::vocab : FarBlockFor::tokens);
  if (d_bias_.data != nullptr) {
    ColumnSumCall sum;
    sum.dtype = c.shape.dtype;
    sum.matrix = masses.data;
    sum.rows = c.shape.tokens;
    sum.columns = tiles;
    sum.stride = masses.stride;
    sum.out = at<float>(layout_.far.tile_sum);
    sum.workspace = base_ + layout_.gradients.column_sums;
    sum.stream = c.stream;
    sum_columns(sum);
  }
  GradientGemmsCall p = gemms_call(c);
  p.block = masses;
  p.block_vocab = tiles;
  p.weight = far_.centroid;
  p.weight_stride = c.shape.dim;
  p.target_weight = c.weight;
  p.target_stride = c.weight_stride;
  p.active = c.active;
  if (d_weight_.data != nullptr)
    p.d_weight = {base_ + layout_.far.tile_gradient, c.shape.dim, DType::f32, false};
  if (sampled) {
    if (d_weight_.data != nullptr) kernel_.gradient_gemms(p);
    p.d_weight = {};
    far_block(block, masses, FarBlockFor::tokens);
  }
  if (wants_hidden()) {
    p.d_hidden = hidden_sums(c, true);
    if (smooths_apart(features_)) p.weight_sum = at<float>(layout_.gradients.weight_sum);
  }
  if (p.d_hidden.data != nullptr || p.d_weight.data != nullptr) kernel_.gradient_gemms(p);
  if (d_weight_.data != nullptr && smooths_apart(features_)) sum_hidden(c);
}

// Returns the operands for the entries from `position` on, without the block.
GradientGemmsCall Engine::near_call(const ForwardCall& c, bool first_chunk, std::int64_t position) {
  GradientGemmsCall p = gemms_call(c);
  p.targets_per_token = 0;  // far_gemms adds them
  p.weight_stride = far_.order.identity ? c.weight_stride : c.shape.dim;
  p.far = {.call = &far_, .vocab = c.shape.vocab, .first_position = position};
  if (wants_hidden()) p.d_hidden = hidden_sums(c, false);
  if (d_weight_.data == nullptr) return p;
  p.d_weight = weight_sums(first_chunk);
  p.entries = target_entries();
  p.many = at<float>(layout_.gradients.many);
  p.far.tile_gradient = at<float>(layout_.far.tile_gradient);
  if (smooths_apart(features_)) {
    p.hidden_sum = at<float>(layout_.gradients.hidden_sum);
    p.logit_weights = far_.logit_weights == nullptr ? nullptr : far_.logit_weights + position;
  }
  return p;
}

void Engine::near_gemms(const BlockCall& block, bool first_chunk) {
  GradientGemmsCall p = near_call(block.chunk, first_chunk, block.vocab_begin);
  p.block = block.block;
  p.block_vocab = block.vocab_count;
  p.weight = block.weight_rows;
  kernel_.gradient_gemms(p);
}

}  // namespace logitless::cuda

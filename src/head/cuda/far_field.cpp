#include "head/cuda/far_field.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "head/cuda/views.h"
#include "head/far_work.h"
#include "kernels/device/stream.h"

namespace logitless::cuda {
namespace {

const float* unscale_of(const BlockCall& block) {
  return block.scales == nullptr ? nullptr : block.scales + 1;
}

}  // namespace

FarField::FarField(const Run& run) : run_(run), backward_(run) {
  const FarLayout& layout = run_.layout.far;
  far_.tau = run_.call.plan->tau;
  require(run_.call.far.order != nullptr && !run_.call.far.order->empty(),
          "order: a far-field plan needs one (make_vocab_order), got none");
  const VocabOrder& order = *run_.call.far.order;
  const std::int64_t vocab_count =
      run_.sharded() ? run_.call.shard.vocab.rows() : run_.all.shape.vocab;
  require(order.vocab() == vocab_count, "order: made for ", order.vocab(),
          " vocabulary entries, the call has ", vocab_count);
  if (run_.sharded()) {
    require(static_cast<std::int64_t>(order.places().size()) == run_.all.global_vocab,
            "order: expected one of share_order, with the places of the ", run_.all.global_vocab,
            " vocabulary of all ranks, got ",
            order.places().empty() ? std::string("one without places")
                                   : concat("places of ", order.places().size()));
    far_.reports_fallback =
        holds_its_part(far_tile_count(vocab_count), run_.call.shard.tiles, run_.call.shard.ranks());
  }
  order_ = device_order(order);
  if (!run_.sharded()) order_.places = nullptr;
  far_.arranged = {
      run_.at<std::int32_t>(layout.groups), run_.at<std::int32_t>(layout.arranged_vocab),
      run_.at<std::int32_t>(layout.arranged_positions), run_.at<float>(layout.arranged_share),
      run_.at<std::byte>(layout.arranged_centroid)};
  use_own_order();
  far_.most_selected = static_cast<float>(kMaxSelected);
  far_.block_vocab_count = run_.sizes.vocab_block;
  far_.swept_vocab = layout.swept;
  far_.gathered = run_.at<std::byte>(layout.gathered);
  if (run_.all.bias != nullptr) far_.bias = run_.at<float>(layout.bias);
  if (run_.all.logit_weights != nullptr) far_.logit_weights = run_.at<float>(layout.logit_weights);
  far_.mass = run_.at<float>(layout.mass);
  far_.tokens = {
      run_.all.hidden,
      run_.all.hidden_stride,
      hidden_rows(),
      token_order().slots,
      {run_.at<std::int32_t>(layout.chunk_keys), run_.at<std::int32_t>(layout.chunk_rows),
       run_.at<std::int32_t>(layout.chunk_positions), run_.at<std::int32_t>(layout.chunk_counts)}};
  far_.radius = run_.at<float>(layout.radius);
  far_.distance = run_.at<float>(layout.distance);
  far_.block_groups = run_.at<std::uint32_t>(layout.block_groups);
  far_.group_blocks = run_.at<std::uint32_t>(layout.group_blocks);
  far_.list = run_.at<std::uint32_t>(layout.list);
  far_.list_begin = run_.at<std::int32_t>(layout.list_begin);
  far_.sums = run_.at<FarSums>(layout.sums);
  if (run_.sizes.both) set_estimate(order);
}

void FarField::set_estimate(const VocabOrder& order) {
  require(order.dim() == run_.all.shape.dim || (run_.sharded() && run_.empty_shard()),
          "order: plan far_both needs the moments of its tiles (measure_tiles) of dim ",
          run_.all.shape.dim,
          order.has_moments() ? concat(", got some of ", order.dim()) : ", got none");
  require(run_.d_hidden_bound == nullptr,
          "d_hidden_bound: plan far_both has none; its audit measures the error");
  const EstimateLayout& layout = run_.layout.estimates;
  prepare_estimates();
  if (order.has_moments()) estimate_.moments = device_moments(order);
  estimate_.target_weight_sum = run_.at<float>(layout.target_weight_sum);
  estimate_.log2_base = run_.at<float>(layout.log2_base);
  estimate_.mean = run_.at<std::byte>(layout.mean);
  estimate_.along = run_.at<float>(layout.along);
  estimate_.squares = run_.at<std::byte>(layout.squares);
  estimate_.forms = run_.at<float>(layout.forms);
  estimate_.total = run_.at<float>(layout.total_mass);
  estimate_.far_sum = run_.at<float>(layout.far_sum);
  estimate_.constants = run_.at<float>(layout.constants);
  estimate_.products = run_.at<std::byte>(layout.products);
  far_.estimate = &estimate_;
}

// Uses the call's order, until a chunk's tiles are selected.
void FarField::use_own_order() {
  far_.order = order_;
  far_.centroid = run_.at<std::byte>(run_.layout.far.centroid);
  far_.groups = nullptr;
}

// Uses the arranged order after the selection, see FarCall::groups.
void FarField::use_arranged_order(const ForwardCall& chunk) {
  const FarArrangement& to = far_.arranged;
  far_.groups = to.groups;
  if (order_.identity) return;
  far_.order.vocab_ids = to.vocab_ids;
  far_.order.positions = to.positions;
  far_.order.share = to.share;
  far_.centroid = to.centroid;
  gather_vectors(chunk);
}

float* FarField::bound() const {
  return run_.sizes.both ? nullptr : run_.at<float>(run_.layout.far.bound);
}

TargetOrder FarField::token_order() const {
  return {run_.at<std::int32_t>(run_.layout.far.token_keys),
          run_.at<std::int32_t>(run_.layout.far.token_rows),
          run_.at<std::int32_t>(run_.layout.far.token_positions),
          run_.at<std::int32_t>(run_.layout.far.token_counts)};
}

void FarField::begin() {
  fill_device(far_.sums, 0, sizeof(FarSums), run_.all.stream);
  if (run_.all.shape.tokens == 0) return;
  order_tokens(run_.all, order_, token_order());
  sum_all_weights();
}

void FarField::sum_all_weights() const {
  if (smooths_apart(run_.features) && (run_.wants_hidden() || run_.sizes.both))
    backward_.sum_weights(run_.all, run_.all.weight, run_.all.shape.vocab, run_.all.logit_weights);
}

ForwardCall FarField::chunk_call(std::int64_t first, std::int64_t count) const {
  ForwardCall c = run_.call_by_rows(token_order().slots, first, count);
  c.far = &far_;
  c.hidden = hidden_rows();
  c.hidden_stride = c.shape.dim;
  return c;
}

void FarField::forward(const ForwardCall& c) {
  const FarForward& forward = *run_.kernel.far;
  use_own_order();
  gather_tokens(c, run_.all.hidden, run_.all.hidden_stride, hidden_rows());
  forward.begin(c);
  if (c.shape.tokens == 0) return;
  gather_vectors(c);
  if (!run_.sizes.both) return forward.all_tiles(c);
  estimate(c, c.first_token == 0);
  forward_selected_tiles(c, forward.target_logits(c));
}

void FarField::forward_selected_tiles(const ForwardCall& c, float* target_logits) {
  const int per_token = c.shape.targets_per_token;
  sort_tokens(c, nullptr,
              std::array{TokenValues{estimate_.total, 1, 0, 1},
                         TokenValues{target_logits, per_token, 1, per_token}});
  select_estimated(c, target_logits);
  use_arranged_order(c);
  run_.kernel.far->selected_tiles(c);
  if (run_.features.label_smoothing)
    estimate_weighted_sums(c, run_.at<float>(run_.layout.gradients.weight_sum));
}

void FarField::order_chunk(const ForwardCall& chunk, std::int32_t* rows) {
  far_.tokens.hidden = chunk.hidden;
  far_.tokens.hidden_stride = chunk.hidden_stride;
  far_.tokens.rows = rows;
  order_chunk_tokens(chunk, order_, far_.tokens.order);
  copy_async(rows, far_.tokens.order.slots,
             static_cast<std::size_t>(chunk.shape.tokens) * sizeof(*rows), chunk.stream);
}

void FarField::begin_forward(const ForwardCall& c) {
  run_.kernel.far->begin(c);
  use_own_order();
  if (c.shape.tokens > 0) gather_vectors(c);
}

void FarField::estimate(const ForwardCall& c, bool first_chunk) const {
  if (c.shape.tokens == 0) return;
  if (first_chunk) prepare_means(c);
  estimate_masses(c);
}

// Sorts tokens by their selected tiles, with all per-token inputs of the backward.
void FarField::sort_chunk(const ForwardCall& c) const {
  const std::int64_t per_token = c.shape.targets_per_token;
  constexpr std::int64_t kCoefficients = sizeof(RowCoefficients) / sizeof(float);
  const auto each = [&](void* data, std::int64_t count) {
    return TokenValues{data, count, 1, count};
  };
  auto* const rows = run_.at<RowCoefficients>(run_.layout.gradients.rows);
  sort_tokens(c, rows,
              std::array{each(c.lse, 1), each(c.log_prob, per_token),
                         each(c.target_logit, per_token), each(rows, kCoefficients),
                         each(run_.at<float>(run_.layout.gradients.delta), per_token)});
}

void FarField::set_sample(std::int64_t chunk) {
  if (run_.d_weight.data != nullptr || run_.d_bias.data != nullptr)
    far_.sample = FarSample(run_.call.plan->sample_every, run_.call.far.sample_seed, chunk);
  far_.sample.first_tile = run_.call.shard.first_tile;
}

void FarField::gradients(const ForwardCall& chunk, const ChunkPlace& place,
                         std::int64_t sample_chunk) {
  const bool first_chunk = place.first;
  const std::int64_t vocab = chunk.shape.vocab;
  BlockCall b = backward_.block_call(chunk);
  b.block = {};
  b.vocab_count = vocab;
  if (!run_.sizes.both) sort_chunk(chunk);  // far_both has sorted in the forward
  set_sample(sample_chunk);
  if (chunk.shape.dtype == DType::f16) {
    b.scales = run_.at<float>(run_.layout.gradients.scales);
    scale_block(b);
  }
  order_targets(chunk, backward_.target_order());
  prepare_block(b);
  TargetEntries entries = backward_.target_entries();
  entries.many = nullptr;  // summed later, in memory that the selection of tiles uses
  list_targets(b, backward_.target_order(), entries);
  if (!run_.sizes.both) {
    select_tiles(chunk, b.rows);
    use_arranged_order(chunk);
  } else if (far_.sample.every > 0) {  // far_both has selected in the forward
    sample_tiles(chunk);
  }
  const LogitBlock masses{run_.at<std::byte>(run_.layout.far.block),
                          padded_vocab(far_tile_count(vocab))};
  far_gemms(b, masses);
  GradientGemmsCall targets = backward_.gemms_call(chunk);
  targets.block_vocab = vocab;
  targets.entries = backward_.target_entries();
  if (targets.entries.many != nullptr) sum_many_entries(targets);
  b.block = chunk.block;
  for (FarVocabBlock vocab_block; vocab_block.first < vocab;
       vocab_block.first += vocab_block.vocab_count) {
    vocab_block.vocab_count = std::min(far_.block_vocab_count, vocab - vocab_block.first);
    b.vocab_begin = vocab_block.first;
    b.vocab_count = vocab_block.vocab_count;
    // Tiles of the weights are the same for all chunks; estimates have no bound.
    const bool radii = first_chunk && !run_.sizes.both;
    b.weight_rows =
        gather_block(chunk, vocab_block, radii ? GatherPart::radii : GatherPart::rows, nullptr);
    run_.kernel.gradient_block(b);
    clear_targets(b);
    if (run_.d_bias.data != nullptr)
      far_bias(b, run_.at<float>(run_.layout.far.tile_sum), !first_chunk,
               run_.at<float>(run_.layout.gradients.d_bias));
    near_gemms(b, first_chunk);
  }
  if (run_.d_weight.data != nullptr) put_far_vocab(near_call(chunk, first_chunk, 0));
  if (samples_estimates(far_))
    measure_sample(chunk, b.rows, run_.at<double>(run_.layout.far.partial));
  b.vocab_begin = 0;
  b.vocab_count = vocab;
  if (run_.d_bias.data != nullptr)
    backward_.add_bias_parts(b, run_.at<float>(run_.layout.gradients.d_bias));
  if (run_.d_weight.data != nullptr) {
    targets.d_weight = backward_.weight_sums(first_chunk);
    if (targets.d_weight.dtype == DType::f32) add_weight_targets(targets);
  }
  if (bound() != nullptr) far_bounds(b, masses, bound());
}

void FarField::backward(const ForwardCall& chunk, const ChunkPlace& place) {
  gradients(chunk, place, chunk.first_token);
  const GradientOutput d_hidden =
      run_.d_hidden.data == nullptr ? run_.d_hidden : backward_.hidden_sums(chunk, true);
  if (run_.sizes.audited > 0) {
    if (place.first) count_audited(run_.all, audit());
    keep_audited(chunk, audit(), d_hidden);
  }
  finish_far(chunk, d_hidden, bound(), run_.d_hidden_bound,
             run_.at<double>(run_.layout.far.partial));
  backward_.round_hidden(chunk);
}

FarAudit FarField::audit() const {
  FarAudit a;
  // With sharded tokens, each rank audits equally many.
  const std::int64_t wanted = run_.call.shard.tokens_sharded
                                  ? run_.sizes.audited / run_.call.shard.ranks()
                                  : run_.sizes.audited;
  a.tokens = std::min(wanted, run_.all.shape.tokens);
  a.order = token_order().slots;
  a.valid = run_.at<std::int32_t>(run_.layout.audit.valid);
  a.rows = run_.at<std::int32_t>(run_.layout.audit.rows);
  a.d_hidden = run_.at<float>(run_.layout.audit.hidden);
  a.lse = run_.at<float>(run_.layout.audit.lse);
  a.partial = run_.at<double>(run_.layout.audit.partial);
  return a;
}

// Computes the skipped tiles' part of d_hidden, including targets and smoothing of the full
// vocabulary, and the gradient of each tile's centroid.
void FarField::far_gemms(const BlockCall& block, const LogitBlock& masses) const {
  const ForwardCall& c = block.chunk;
  const std::int64_t tiles = far_tile_count(c.shape.vocab);
  const bool sampled = far_.sample.every > 0;
  far_block(block, masses, sampled ? FarBlockFor::vocab : FarBlockFor::tokens);
  if (run_.d_bias.data != nullptr) {
    ColumnSumCall sum;
    sum.dtype = c.shape.dtype;
    sum.matrix = masses.data;
    sum.rows = c.shape.tokens;
    sum.columns = tiles;
    sum.stride = masses.stride;
    if (block.scales != nullptr) sum.weights = block.factor;  // the inverse of the scale
    sum.out = run_.at<float>(run_.layout.far.tile_sum);
    sum.workspace = run_.at<std::byte>(run_.layout.gradients.column_sums);
    sum.stream = c.stream;
    sum_columns(sum);
  }
  GradientGemmsCall p = backward_.gemms_call(c);
  p.block = masses;
  p.block_vocab = tiles;
  p.weight = far_.centroid;
  p.weight_stride = c.shape.dim;
  p.weight_unscale = unscale_of(block);
  p.target_weight = c.weight;
  p.target_stride = c.weight_stride;
  p.active = c.active;
  if (run_.d_weight.data != nullptr)
    p.d_weight = {run_.at<std::byte>(run_.layout.far.tile_gradient), c.shape.dim, DType::f32,
                  false};
  if (sampled) {
    if (run_.d_weight.data != nullptr) run_.kernel.gradient_gemms(p);
    p.d_weight = {};
    far_block(block, masses, FarBlockFor::tokens);
  }
  if (run_.wants_hidden()) {
    p.d_hidden = backward_.hidden_sums(c, true);
    if (smooths_apart(run_.features))
      p.weight_sum = run_.at<float>(run_.layout.gradients.weight_sum);
  }
  if (p.d_hidden.data != nullptr || p.d_weight.data != nullptr) run_.kernel.gradient_gemms(p);
  if (run_.d_weight.data != nullptr && smooths_apart(run_.features)) backward_.sum_hidden(c);
}

// Returns the operands for the entries from `position` on, without the block.
GradientGemmsCall FarField::near_call(const ForwardCall& c, bool first_chunk,
                                      std::int64_t position) const {
  GradientGemmsCall p = backward_.gemms_call(c);
  p.targets_per_token = 0;  // far_gemms adds them
  p.weight_stride = far_.order.identity ? c.weight_stride : c.shape.dim;
  p.far = {.call = &far_, .vocab = c.shape.vocab, .first_position = position};
  if (run_.wants_hidden()) p.d_hidden = backward_.hidden_sums(c, false);
  if (run_.d_weight.data == nullptr) return p;
  p.d_weight = backward_.weight_sums(first_chunk);
  p.entries = backward_.target_entries();
  p.far.tile_gradient = run_.at<float>(run_.layout.far.tile_gradient);
  if (smooths_apart(run_.features)) {
    p.hidden_sum = run_.at<float>(run_.layout.gradients.hidden_sum);
    p.logit_weights = far_.logit_weights == nullptr ? nullptr : far_.logit_weights + position;
  }
  return p;
}

void FarField::near_gemms(const BlockCall& block, bool first_chunk) const {
  GradientGemmsCall p = near_call(block.chunk, first_chunk, block.vocab_begin);
  p.block = block.block;
  p.block_vocab = block.vocab_count;
  p.weight = block.weight_rows;
  p.weight_unscale = unscale_of(block);
  run_.kernel.gradient_gemms(p);
}

}  // namespace logitless::cuda

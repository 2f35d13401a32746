#include "head/cuda/shared_far_field.h"

#include <algorithm>

#include "head/cuda/exchange.h"
#include "kernels/device/shard.h"
#include "kernels/device/shard_far.h"
#include "kernels/device/stream.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

constexpr int kCoefficients = sizeof(RowCoefficients) / sizeof(float);

std::size_t bytes(std::int64_t count, std::size_t each = sizeof(float)) {
  return static_cast<std::size_t>(count) * each;
}

}  // namespace

ForwardCall call_of_local_tokens(const Run& run, const ShardChunk& of) {
  ForwardCall own = run.all;
  own.shape.tokens = std::clamp<std::int64_t>(run.all.shape.tokens - of.first, 0, of.count);
  own.first_token = of.first;
  return own;
}

void SharedFarField::begin() const {
  fill_device(far_.call().sums, 0, sizeof(FarSums), run_.all.stream);
  order_tokens(run_.all, far_.order(), far_.token_order());
  if (run_.sizes.audited > 0) count_audited(run_.all, far_.audit());
  if (!run_.empty_shard()) far_.sum_all_weights();
}

ForwardCall SharedFarField::call_of_local_tokens(const ShardChunk& of) const {
  ForwardCall own = cuda::call_of_local_tokens(run_, of);
  own.rows = far_.token_order().slots;
  own.far = &far_.call();
  return own;
}

void SharedFarField::give_outputs(const ForwardCall& own) const {
  if (run_.sizes.audited > 0) keep_audited(own, far_.audit(), {});
  scatter_outputs(own, run_.all);
}

// Returns the chunk's tokens in the local order.
ForwardCall SharedFarField::call_in_local_order(const ForwardCall& chunk) const {
  const ShardFarLayout& own = run_.layout.shard_far;
  ForwardCall c = chunk;
  c.far = &far_.call();
  c.rows = run_.at<std::int32_t>(own.rows);
  c.hidden = far_.hidden_rows();
  c.hidden_stride = c.shape.dim;
  c.given_logits = run_.at<float>(own.merged_logits);
  c.records = run_.at<TokenRecord>(own.records);
  c.lse = run_.at<float>(own.lse);
  c.lse_rest = nullptr;
  c.log_prob = run_.at<float>(own.log_prob);
  c.target_logit = run_.at<float>(own.target_logit);
  return c;
}

void SharedFarField::forward(ForwardCall& chunk, bool first_chunk, TokenRecord* mine) {
  if (run_.empty_shard()) {
    chunk.records = mine;
    write_neutral_records(chunk);
    if (run_.sizes.both) exchange_totals(nullptr, chunk.shape.tokens);
    return;
  }
  forward_local(chunk, first_chunk);
  const bool weighs = run_.sizes.both && run_.features.label_smoothing;
  put_records(local_, local_.records, weighs ? local_.weighted_sum : nullptr, mine);
}

void SharedFarField::forward_local(const ForwardCall& chunk, bool first_chunk) {
  local_ = call_in_local_order(chunk);
  const ForwardCall& c = local_;
  far_.order_chunk(chunk, run_.at<std::int32_t>(run_.layout.shard_far.rows));
  gather_tokens(c, chunk.hidden, chunk.hidden_stride, far_.hidden_rows());
  auto* const given = run_.at<float>(run_.layout.shard_far.merged_logits);
  take_rows(c, chunk.given_logits, c.shape.targets_per_token, given);
  far_.begin_forward(c);
  if (!run_.sizes.both) return run_.kernel.far->all_tiles(c);
  far_.estimate(c, first_chunk);
  exchange_totals(&c, c.shape.tokens);
  if (c.shape.tokens > 0) far_.forward_selected_tiles(c, given);
}

// Replaces the totals of the local estimates by those of all ranks'. Null: the shard is empty.
void SharedFarField::exchange_totals(const ForwardCall* local, std::int64_t tokens) const {
  CollectiveCalls& calls = *run_.call.shard.calls;
  auto* const of_ranks = run_.at<float>(run_.layout.shard_far.values);
  auto* const merged = run_.at<float>(run_.layout.shard_far.merged);
  float* const mine = of_ranks + run_.call.shard.rank() * tokens;
  local == nullptr ? no_totals(mine, tokens, run_.all.stream)
                   : put_rows(*local, far_.total_mass(), 1, mine);
  calls.all_gather(mine, of_ranks, bytes(tokens), run_.all.stream);
  merge_totals(of_ranks, run_.call.shard.ranks(), tokens, merged, run_.all.stream);
  if (local != nullptr) take_rows(*local, merged, 1, far_.total_mass());
}

void SharedFarField::backward(const ForwardCall& chunk, const ShardChunk& of) {
  const ForwardCall& c = local_;
  const std::int64_t tokens = c.shape.tokens;
  const int per_token = c.shape.targets_per_token;
  const ShardFarLayout& from = run_.layout.shard_far;
  RowCoefficients* const rows = run_.coefficients();
  take_rows(c, chunk.lse, 1, c.lse);
  take_rows(c, chunk.log_prob, per_token, c.log_prob);
  take_rows(c, chunk.target_logit, per_token, c.target_logit);
  take_rows(c, run_.at<float>(from.delta), per_token, run_.delta());
  take_rows(c, run_.at<float>(from.token_coefficients), kCoefficients,
            reinterpret_cast<float*>(rows));
  fill_device(rows + tokens, 0, bytes(padded_tokens(tokens) - tokens, sizeof(RowCoefficients)),
              c.stream);
  far_.gradients(c, of.place, of.first);
  if (!run_.wants_hidden()) return;
  const GradientOutput partial{.data = run_.at<float>(run_.layout.gradients.d_hidden),
                               .stride = c.shape.dim,
                               .dtype = DType::f32,
                               .add = false};
  round_sums(run_.at<float>(run_.layout.shard.received), tokens, c.shape.dim, partial, c.stream,
             c.rows);
  record_event(comm_of(run_).hidden_done.get(), c.stream);
}

void SharedFarField::exchange_bounds(const ForwardCall& chunk, const ShardChunk& of) const {
  const ShardOperands& shard = run_.call.shard;
  const std::int64_t tokens = chunk.shape.tokens;
  auto* const of_ranks = run_.at<float>(run_.layout.shard_far.values);
  auto* const merged = run_.at<float>(run_.layout.shard_far.merged);
  float* const mine = of_ranks + shard.rank() * tokens;
  run_.empty_shard() ? fill_device(mine, 0, bytes(tokens), chunk.stream)
                     : put_rows(local_, run_.at<float>(run_.layout.far.bound), 1, mine);
  shard.calls->all_gather(mine, of_ranks, bytes(tokens), chunk.stream);
  merge_bounds(of_ranks, shard.ranks(), tokens, merged, far_.call().sums, chunk.stream);
  if (run_.d_hidden_bound == nullptr) return;
  const std::int64_t row = shard.tokens_sharded ? shard.rank() * of.count : 0;
  give_bounds(call_of_local_tokens(of), merged + row, run_.d_hidden_bound);
}

void SharedFarField::finish_hidden(const float* sums, const ShardChunk& of) const {
  const ForwardCall own = call_of_local_tokens(of);
  const GradientOutput unrounded{const_cast<float*>(sums), own.shape.dim, DType::f32, false};
  finish_far(own, unrounded, nullptr, nullptr, run_.at<double>(run_.layout.far.partial));
  if (run_.sizes.audited > 0) {
    ForwardCall rows = own;
    rows.lse = nullptr;  // already saved
    keep_audited(rows, far_.audit(), unrounded);
  }
  round_sums(sums, own.shape.tokens, own.shape.dim, run_.d_hidden, own.stream, own.rows + of.first);
}

void publish_far_sums(const Run& run) {
  auto* const of_ranks = run.at<FarSums>(run.layout.shard_far.sums);
  FarSums* const mine = of_ranks + run.call.shard.rank();
  copy_async(mine, run.at<FarSums>(run.layout.far.sums), sizeof(FarSums), run.all.stream);
  run.call.shard.calls->all_gather(mine, of_ranks, sizeof(FarSums), run.all.stream);
}

}  // namespace logitless::cuda

// The vocabulary-parallel far field on a GPU. Each rank selects local tiles by itself, from global
// totals. Exchanges use the order in which a chunk was made, the same on all ranks. Each rank
// computes in its local order, by its selected tiles.
#include "core/check.h"
#include "head/cuda/engine.h"
#include "head/vocab_order_access.h"
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

// Returns a hash that is equal on ranks whose orders were shared together. Ranks with other orders
// would put other tokens into a chunk.
std::uint64_t Engine::common_order() const {
  return sizes_.far ? VocabOrderAccess::of(*call_.far.order).common : 0;
}

void Engine::begin_shared_far() {
  fill_device(far_.sums, 0, sizeof(FarSums), all.stream);
  order_tokens(all, order_, token_order());
  if (sizes_.audited > 0) count_audited(all, far_audit());
  if (!empty_shard()) sum_all_weights();
}

// Returns the chunk's tokens in the local order.
ForwardCall Engine::call_in_local_order(const ForwardCall& chunk) const {
  const ShardFarLayout& own = layout_.shard_far;
  ForwardCall c = chunk;
  c.far = &far_;
  c.rows = at<std::int32_t>(own.rows);
  c.hidden = hidden_rows();
  c.hidden_stride = c.shape.dim;
  c.given_logits = at<float>(own.merged_logits);
  c.records = at<TokenRecord>(own.records);
  c.lse = at<float>(own.lse);
  c.log_prob = at<float>(own.log_prob);
  c.target_logit = at<float>(own.target_logit);
  return c;
}

// Computes the records over the global vocabulary; for far_both they include the estimates of
// skipped tiles.
void Engine::forward_shared_far(ForwardCall& chunk, bool first_chunk) {
  const std::int64_t tokens = chunk.shape.tokens;
  auto* const records = at<TokenRecord>(layout_.shard.records);
  TokenRecord* const mine = records + call_.shard.rank() * tokens;
  if (empty_shard()) {
    chunk.records = mine;
    write_neutral_records(chunk);
    if (sizes_.both) exchange_totals(nullptr, tokens);
  } else {
    forward_local(chunk, first_chunk);
    const bool weighs = sizes_.both && features_.label_smoothing;
    put_records(local_, local_.records, weighs ? local_.weighted_sum : nullptr, mine);
  }
  call_.shard.calls->all_gather(mine, records, bytes(tokens, sizeof(TokenRecord)), chunk.stream);
  merge_records(chunk, records, call_.shard.ranks());
}

void Engine::forward_local(const ForwardCall& chunk, bool first_chunk) {
  far_.tokens.hidden = chunk.hidden;
  far_.tokens.hidden_stride = chunk.hidden_stride;
  far_.tokens.rows = at<std::int32_t>(layout_.shard_far.rows);
  local_ = call_in_local_order(chunk);
  const ForwardCall& c = local_;
  const int per_token = c.shape.targets_per_token;
  order_chunk_tokens(chunk, order_, far_.tokens.order);
  copy_async(far_.tokens.rows, far_.tokens.order.slots, bytes(c.shape.tokens), c.stream);
  gather_tokens(c, chunk.hidden, chunk.hidden_stride, hidden_rows());
  auto* const given = at<float>(layout_.shard_far.merged_logits);
  take_rows(c, chunk.given_logits, per_token, given);
  kernel_.far->begin(c);
  use_own_order();
  if (c.shape.tokens > 0) gather_vectors(c);
  if (!sizes_.both) return kernel_.far->all_tiles(c);
  if (c.shape.tokens > 0) {
    if (first_chunk) prepare_means(c);
    estimate_masses(c);
  }
  exchange_totals(&c, c.shape.tokens);
  if (c.shape.tokens > 0) forward_selected_tiles(c, given);
}

// Replaces the totals of the local estimates by those of all ranks'. Null: the shard is empty.
void Engine::exchange_totals(const ForwardCall* local, std::int64_t tokens) const {
  auto* const of_ranks = at<float>(layout_.shard_far.values);
  auto* const merged = at<float>(layout_.shard_far.merged);
  float* const mine = of_ranks + call_.shard.rank() * tokens;
  local == nullptr ? no_totals(mine, tokens, all.stream)
                   : put_rows(*local, estimate_.total, 1, mine);
  call_.shard.calls->all_gather(mine, of_ranks, bytes(tokens), all.stream);
  merge_totals(of_ranks, call_.shard.ranks(), tokens, merged, all.stream);
  if (local != nullptr) take_rows(*local, merged, 1, estimate_.total);
}

// Returns the call for this rank's tokens of a chunk, without padding, in the order of the chunk.
ForwardCall Engine::call_of_local_tokens(const ShardChunk& of) const {
  ForwardCall own = all;
  own.shape.tokens = std::clamp<std::int64_t>(all.shape.tokens - of.first, 0, of.count);
  own.first_token = of.first;
  if (!sizes_.far) return own;
  own.rows = token_order().slots;
  own.far = &far_;
  return own;
}

// Computes the gradients of the local shard, and its partial sums of d_hidden.
void Engine::backward_local(const ForwardCall& chunk, const ShardChunk& of) {
  const ForwardCall& c = local_;
  const std::int64_t tokens = c.shape.tokens;
  const int per_token = c.shape.targets_per_token;
  auto* const rows = at<RowCoefficients>(layout_.gradients.rows);
  take_rows(c, chunk.lse, 1, c.lse);
  take_rows(c, chunk.log_prob, per_token, c.log_prob);
  take_rows(c, chunk.target_logit, per_token, c.target_logit);
  take_rows(c, at<float>(layout_.shard_far.delta), per_token, at<float>(layout_.gradients.delta));
  take_rows(c, at<float>(layout_.shard_far.token_coefficients), kCoefficients,
            reinterpret_cast<float*>(rows));
  fill_device(rows + tokens, 0, bytes(padded_tokens(tokens) - tokens, sizeof(RowCoefficients)),
              c.stream);
  far_chunk_ = of.first;
  far_backward(c, of.first == 0);
  if (!wants_hidden()) return;
  const GradientOutput partial{.data = at<float>(layout_.gradients.d_hidden),
                               .stride = c.shape.dim,
                               .dtype = DType::f32,
                               .add = false};
  round_sums(at<float>(layout_.shard.received), tokens, c.shape.dim, partial, c.stream, c.rows);
  record_event(comm().hidden_done.get(), c.stream);
}

// The error of a token's d_hidden is at most the sum of the ranks' bounds.
void Engine::exchange_bounds(const ForwardCall& chunk, const ShardChunk& of) const {
  const std::int64_t tokens = chunk.shape.tokens;
  auto* const of_ranks = at<float>(layout_.shard_far.values);
  auto* const merged = at<float>(layout_.shard_far.merged);
  float* const mine = of_ranks + call_.shard.rank() * tokens;
  empty_shard() ? fill_device(mine, 0, bytes(tokens), chunk.stream)
                : put_rows(local_, at<float>(layout_.far.bound), 1, mine);
  call_.shard.calls->all_gather(mine, of_ranks, bytes(tokens), chunk.stream);
  merge_bounds(of_ranks, call_.shard.ranks(), tokens, merged, far_.sums, chunk.stream);
  if (bound_output_ == nullptr) return;
  const std::int64_t row = call_.shard.tokens_sharded ? call_.shard.rank() * of.count : 0;
  give_bounds(call_of_local_tokens(of), merged + row, bound_output_);
}

// Computes the norm and saves the rows of audited tokens, from sums [tokens, D]: d_hidden of the
// global vocabulary before rounding.
void Engine::finish_far_hidden(const float* sums, const ShardChunk& of) const {
  const ForwardCall own = call_of_local_tokens(of);
  const GradientOutput unrounded{const_cast<float*>(sums), own.shape.dim, DType::f32, false};
  finish_far(own, unrounded, nullptr, nullptr, at<double>(layout_.far.partial));
  if (sizes_.audited > 0) {
    ForwardCall rows = own;
    rows.lse = nullptr;  // already saved
    keep_audited(rows, far_audit(), unrounded);
  }
  round_sums(sums, own.shape.tokens, own.shape.dim, d_hidden_, own.stream, own.rows + of.first);
}

void Engine::publish_far_sums() const {
  auto* const of_ranks = at<FarSums>(layout_.shard_far.sums);
  FarSums* const mine = of_ranks + call_.shard.rank();
  copy_async(mine, far_.sums, sizeof(FarSums), all.stream);
  call_.shard.calls->all_gather(mine, of_ranks, sizeof(FarSums), all.stream);
}

}  // namespace logitless::cuda

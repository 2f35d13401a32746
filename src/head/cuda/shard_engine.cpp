// The chunk loop of words over ranks, and of tokens where these are spread, too: what is exchanged,
// and when. Everything is enqueued; all ranks go through the same chunks.
#include <algorithm>

#include "core/check.h"
#include "head/cuda/engine.h"
#include "kernels/device_shard.h"
#include "kernels/device_stream.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

}  // namespace

void Engine::require_shard() const {
  const auto aligned = [](std::string_view name, const void* data, std::int64_t stride,
                          DType dtype) {
    const auto row = stride * static_cast<std::int64_t>(size_of(dtype));
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0 || row % 16 != 0)
      throw Unsupported(
          concat(name, ": expected an address and rows that are multiples of 16 bytes"));
  };
  aligned("hidden", all.hidden, all.hidden_stride, all.shape.dtype);
  aligned("weight", all.weight, all.weight_stride, all.shape.dtype);
  if (d_weight_.data != nullptr && !round_weight_ && !gathered())
    aligned("d_weight", d_weight_.data, d_weight_.stride, d_weight_.dtype);
}

void Engine::meet_tokens() const {
  call_.shard.calls->tokens(call_.shard.tokens ? 0 : all.shape.tokens);
}

void Engine::run_sharded(const ChunkFunction& tokens) {
  const ShardOperands& shard = call_.shard;
  const bool gradients = wants_gradients(features_);
  meet_tokens();
  const std::int64_t ranks = shard.ranks();
  // Of spread tokens the greatest number of a rank, as planned, and of a chunk those of each rank.
  const std::int64_t total = shard.tokens ? layout_tokens_ / ranks : all.shape.tokens;
  const std::int64_t most =
      std::max<std::int64_t>(shard.tokens ? sizes_.chunk / ranks : sizes_.chunk, 1);
  if (shard.tokens) fill_device(statistics(), 0xff, 2 * sizeof(std::uint64_t), all.stream);
  std::int64_t first = 0;
  do {
    const std::int64_t step = std::min(most, total - first);
    last_chunk_ = first + step == total;
    ForwardCall chunk = shard.tokens ? spread_chunk(first, step) : chunk_call(first, step);
    forward_sharded(chunk);
    if (shard.tokens) {
      own_tokens(chunk, first, tokens);
    } else {
      tokens(chunk, gradients ? at<RowCoefficients>(layout_.gradients.rows) : nullptr,
             gradients ? at<float>(layout_.gradients.delta) : nullptr);
    }
    if (gradients && total > 0) backward_sharded(chunk, first);
    first += step;
  } while (first < total);
  if (shard.words.rows() == 0) return;
  if (gradients && total > 0) round_weights();
  if (total == 0) clear_weights();
}

// A chunk of `step` tokens of each rank, from its token `first` on. Targets that are none are -1 in
// it; ranks with fewer tokens have such ones after their own.
ForwardCall Engine::spread_chunk(std::int64_t first, std::int64_t step) {
  CollectiveCalls& calls = *call_.shard.calls;
  const std::int64_t ranks = call_.shard.ranks();
  const int per_token = all.shape.targets_per_token;
  const std::size_t row = bytes(all.shape.dim, size_of(all.shape.dtype));
  std::byte* const hidden = base_ + layout_.shard.hidden;
  auto* const targets = at<std::int64_t>(layout_.shard.targets);
  OwnTokens own;
  own.first = first;
  own.count = std::clamp<std::int64_t>(all.shape.tokens - first, 0, step);
  own.step = step;
  const std::int64_t place = call_.shard.rank() * step;
  own.hidden = hidden + bytes(place, row);
  own.targets = targets + place * per_token;
  copy_own_tokens(all, own);
  calls.all_gather(own.hidden, hidden, bytes(step, row), all.stream);
  calls.all_gather(own.targets, targets, bytes(step * per_token, sizeof(*targets)), all.stream);

  // Outputs are in the workspace, the tokens of one rank after those of another.
  const ForwardOutputs outputs = all;
  static_cast<ForwardOutputs&>(all) = {};
  ForwardCall chunk = chunk_call(0, ranks * step);
  static_cast<ForwardOutputs&>(all) = outputs;
  chunk.hidden = hidden;
  chunk.hidden_stride = all.shape.dim;
  chunk.targets = targets;
  chunk.wide_targets = true;
  chunk.target_logit = at<float>(layout_.target_logit);
  chunk.bad_target = at<std::uint64_t>(layout_.shard.bad_target);
  return chunk;
}

// The outputs of a chunk for all words.
void Engine::forward_sharded(ForwardCall& chunk) {
  CollectiveCalls& calls = *call_.shard.calls;
  const int ranks = call_.shard.ranks();
  const int rank = call_.shard.rank();
  const bool empty = call_.shard.words.rows() == 0;
  const std::int64_t slots = chunk.shape.tokens * chunk.shape.targets_per_token;
  auto* const logits = at<float>(layout_.shard.logits);
  auto* const given = at<float>(layout_.shard.given);
  float* const mine = logits + rank * slots;
  if (empty) {
    fill_device(mine, 0, bytes(slots, sizeof(float)), chunk.stream);
  } else {
    kernel_.target_logits(chunk, mine);
  }
  calls.all_gather(mine, logits, bytes(slots, sizeof(float)), chunk.stream);
  merge_logits(logits, ranks, slots, given, chunk.stream);
  chunk.given_logits = given;

  auto* const records = at<TokenRecord>(layout_.shard.records);
  chunk.records = records + rank * chunk.shape.tokens;
  empty ? forward_nothing(chunk) : kernel_.forward(chunk);
  calls.all_gather(chunk.records, records, bytes(chunk.shape.tokens, sizeof(TokenRecord)),
                   chunk.stream);
  merge_records(chunk, records, ranks);
}

// Of a chunk of spread tokens: each rank says what its own are to get, and all learn of it.
void Engine::own_tokens(const ForwardCall& chunk, std::int64_t first,
                        const ChunkFunction& tokens) const {
  const ShardOperands& shard = call_.shard;
  const std::int64_t step = chunk.shape.tokens / shard.ranks();
  const std::int64_t row = shard.rank() * step;
  const int per_token = chunk.shape.targets_per_token;
  const auto from = [&](auto* values, std::int64_t offset) {
    return values == nullptr ? nullptr : values + offset;
  };
  ForwardCall own = all;
  own.shape.tokens = std::clamp<std::int64_t>(all.shape.tokens - first, 0, step);
  own.first_token = first;
  own.lse = from(chunk.lse, row);
  own.log_prob = from(chunk.log_prob, row * per_token);
  own.target_logit = from(chunk.target_logit, row * per_token);
  own.weighted_sum = from(chunk.weighted_sum, row);
  own.entropy = from(chunk.entropy, row);
  own.argmax = from(chunk.argmax, row);
  if (!wants_gradients(features_)) {
    tokens(own, nullptr, nullptr);
    return own_outputs(own);
  }
  auto* const own_rows = at<RowCoefficients>(layout_.shard.own_rows);
  auto* const own_delta = at<float>(layout_.shard.own_delta);
  const std::size_t row_bytes = bytes(step, sizeof(RowCoefficients));
  const std::size_t delta_bytes = bytes(step * per_token, sizeof(float));
  fill_device(own_rows, 0, row_bytes, all.stream);
  fill_device(own_delta, 0, delta_bytes, all.stream);
  tokens(own, own_rows, own_delta);
  own_outputs(own);
  auto* const rows = at<RowCoefficients>(layout_.gradients.rows);
  const std::int64_t count = chunk.shape.tokens;
  fill_device(rows + count, 0, bytes(padded_tokens(count) - count, sizeof(RowCoefficients)),
              all.stream);
  shard.calls->all_gather(own_rows, rows, row_bytes, all.stream);
  shard.calls->all_gather(own_delta, at<float>(layout_.gradients.delta), delta_bytes, all.stream);
}

// From the workspace to where the caller wants them.
void Engine::own_outputs(const ForwardCall& own) const {
  const int per_token = own.shape.targets_per_token;
  const auto give = [&](auto* to, const auto* from, int each) {
    if (to == nullptr || own.shape.tokens == 0) return;
    copy_async(to + own.first_token * each, from, bytes(own.shape.tokens * each, sizeof(*to)),
               all.stream);
  };
  give(all.lse, own.lse, 1);
  give(all.log_prob, own.log_prob, per_token);
  give(all.target_logit, own.target_logit, per_token);
  give(all.weighted_sum, own.weighted_sum, 1);
  give(all.entropy, own.entropy, 1);
  give(all.argmax, own.argmax, 1);
}

void Engine::backward_sharded(const ForwardCall& chunk, std::int64_t first) {
  const std::int64_t tokens = chunk.shape.tokens;
  if (call_.shard.words.rows() > 0) {
    backward(chunk, first == 0);
  } else if (wants_hidden()) {
    fill_device(at<float>(layout_.gradients.d_hidden), 0,
                bytes(tokens * chunk.shape.dim, sizeof(float)), chunk.stream);
  }
  if (wants_hidden()) exchange_hidden(tokens, first);
}

// Each rank adds up the pieces of its tokens, in the order of ranks and in fp32, and rounds them
// once. Where all ranks have all tokens, each adds up a part of them and tells the sums.
void Engine::exchange_hidden(std::int64_t tokens, std::int64_t first) const {
  CollectiveCalls& calls = *call_.shard.calls;
  const int ranks = call_.shard.ranks();
  const int rank = call_.shard.rank();
  const std::int64_t dim = all.shape.dim;
  const std::int64_t block = (tokens + ranks - 1) / ranks;
  auto* const pieces = at<float>(layout_.gradients.d_hidden);
  auto* const received = at<float>(layout_.shard.received);
  const std::size_t block_bytes = bytes(block * dim, sizeof(float));
  calls.all_to_all(pieces, received, block_bytes, all.stream);
  float* const sums = pieces + rank * block * dim;
  add_pieces(received, ranks, block * dim, sums, all.stream);
  GradientOutput out = d_hidden_;
  out.data = static_cast<std::byte*>(out.data) + bytes(first * out.stride, size_of(out.dtype));
  if (call_.shard.tokens) {
    const std::int64_t own = std::clamp<std::int64_t>(all.shape.tokens - first, 0, block);
    if (own > 0) round_sums(sums, own, dim, out, all.stream);
    return;
  }
  calls.all_gather(sums, pieces, block_bytes, all.stream);
  if (tokens > 0) round_sums(pieces, tokens, dim, out, all.stream);
}

const double* Engine::shares_of_ranks(const LossCall& loss) const {
  const ShardOperands& shard = call_.shard;
  if (!sharded() || (!shard.tokens && shard.replicas == nullptr)) return nullptr;
  meet_tokens();
  auto* const of_all = at<double>(layout_.shard.shares);
  double* const total = of_all + kMostRanks;
  sum_shares(loss, all, total);
  const auto sum_over = [&](CollectiveCalls& calls) {
    calls.all_gather(total, of_all, sizeof(double), all.stream);
    // The sum is of one number from each rank.
    add_pieces(of_all, calls.communicator().size(), 1, total, all.stream);
  };
  if (shard.tokens) sum_over(*shard.calls);
  if (shard.replicas != nullptr) sum_over(*shard.replicas);
  return total;
}

void Engine::finish_sharded(const LossCall& loss) const {
  auto* const losses = at<RankLoss>(layout_.shard.losses);
  RankLoss* const mine = losses + call_.shard.rank();
  sum_losses(loss, all, mine);
  call_.shard.calls->all_gather(mine, losses, sizeof(RankLoss), all.stream);
  finish_loss(loss, all, losses, call_.shard.ranks());
}

}  // namespace logitless::cuda

// The chunk loop of a vocabulary-parallel call, also with sharded tokens: the exchanges and their
// schedule. Everything is enqueued, and all ranks go through the same chunks.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "head/cuda/engine.h"
#include "kernels/device_far.h"
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
  if (features_.gathered_columns == 0)  // else copied
    aligned("weight", all.weight, all.weight_stride, all.shape.dtype);
  if (d_weight_.data != nullptr && !round_weight_ && !gathered())
    aligned("d_weight", d_weight_.data, d_weight_.stride, d_weight_.dtype);
}

void Engine::gather_tokens_of_ranks() const {
  call_.shard.calls->tokens(call_.shard.tokens ? 0 : all.shape.tokens, common_order());
}

// Makes the call's stream wait for the communication stream, so that whoever waits for the former
// waits for both.
void Engine::join_comm_stream() const {
  record_event(call_.shard.comm_stream->exchanged.get(), comm_stream());
  stream_wait(all.stream, call_.shard.comm_stream->exchanged.get());
}

// Runs a call that receives into the group's shared memory: it waits for the last call that did, on
// any stream. Launches of a captured graph must be ordered by the caller.
void Engine::with_comm_stream(const std::function<void()>& run) const {
  void* const free = call_.shard.comm_stream->memory_free.get();
  if (free != nullptr) stream_wait_if_running(all.stream, free);
  const auto leave = [&] {
    if (free != nullptr) record_event_if_running(free, all.stream);
  };
  try {
    run();
  } catch (...) {
    join_comm_stream();
    leave();
    throw;
  }
  leave();
}

// Runs the chunks with large exchanges on the communication stream, overlapping the GEMMs. The next
// chunk's inputs arrive while this one's gradients are computed. Its d_hidden is sent during the
// rest of d_weight, or the next forward. All ranks enqueue the same exchanges in the same order.
void Engine::run_sharded(const ChunkFunction& tokens) {
  with_comm_stream([&] { run_chunks(tokens); });
}

void Engine::run_chunks(const ChunkFunction& tokens) {
  const ShardOperands& shard = call_.shard;
  const CommStream& comm_stream = *shard.comm_stream;
  const bool gradients = wants_gradients(features_);
  gather_tokens_of_ranks();
  const std::int64_t ranks = shard.ranks();
  // With sharded tokens, the total is the planned maximum per rank, and a chunk has as many tokens
  // of each rank.
  const std::int64_t total = shard.tokens ? layout_tokens_ / ranks : all.shape.tokens;
  if (makes_chunks()) fill_device(statistics(), 0xff, 2 * sizeof(std::uint64_t), all.stream);
  if (sizes_.far) begin_shared_far();
  const auto chunk_at = [&](std::int64_t first) {
    const std::int64_t planned = first == 0 ? sizes_.first_chunk() : sizes_.chunk;
    const std::int64_t most = std::max<std::int64_t>(shard.tokens ? planned / ranks : planned, 1);
    return ShardChunk{first, std::min(most, total - first), 0};
  };
  ShardChunk now = chunk_at(0);
  record_event(comm_stream.start.get(), all.stream);
  ForwardCall chunk = prepare_chunk(now);
  for (;;) {
    const bool last = now.first + now.step == total;
    last_chunk_ = last;
    stream_wait(all.stream, comm_stream.ready.get());
    sizes_.far ? forward_shared_far(chunk, now.first == 0) : forward_sharded(chunk);
    if (makes_chunks()) {
      local_tokens(chunk, now.first, tokens);
    } else {
      tokens(chunk, gradients ? at<RowCoefficients>(layout_.gradients.rows) : nullptr,
             gradients ? at<float>(layout_.gradients.delta) : nullptr);
    }
    ShardChunk next;
    ForwardCall next_chunk;
    if (!last) {
      next = chunk_at(now.first + now.step);
      next.buffer = 1 - now.buffer;
      record_event(comm_stream.start.get(), all.stream);
      next_chunk = prepare_chunk(next);
    }
    finish_hidden();
    if (gradients && total > 0) backward_sharded(chunk, now);
    if (last) break;
    now = next;
    chunk = next_chunk;
  }
  finish_hidden();
  if (empty()) return;
  if (gradients && total > 0) round_weights();
  if (total == 0) clear_weights();
}

// Prepares a chunk on the communication stream, after everything enqueued on the call's stream so
// far: the tokens of all ranks, and the logits of their targets.
ForwardCall Engine::prepare_chunk(const ShardChunk& of) {
  const CommStream& shared = *call_.shard.comm_stream;
  const Stream stream = all.stream;
  stream_wait(comm_stream(), shared.start.get());
  all.stream = comm_stream();
  ForwardCall chunk;
  try {
    chunk = makes_chunks() ? made_chunk(of) : chunk_call(of.first, of.step);
    set_target_logits(chunk, of.buffer);
  } catch (...) {
    all.stream = stream;
    throw;
  }
  all.stream = chunk.stream = stream;
  record_event(shared.ready.get(), comm_stream());
  return chunk;
}

// Assembles a chunk of `step` tokens (of each rank if tokens are sharded) from token `first` on. A
// far field's chunk is in its order. Targets are -1 where ignored. Ranks with fewer tokens are
// padded with such ones.
ForwardCall Engine::made_chunk(const ShardChunk& of) {
  CollectiveCalls& calls = *call_.shard.calls;
  const std::int64_t ranks = call_.shard.tokens ? call_.shard.ranks() : 1;
  const std::int64_t step = of.step;
  const int per_token = all.shape.targets_per_token;
  const std::size_t row = bytes(all.shape.dim, size_of(all.shape.dtype));
  auto* const hidden = at<std::byte>(layout_.shard.hidden[of.buffer]);
  auto* const targets = at<std::int64_t>(layout_.shard.targets[of.buffer]);
  LocalTokens own;
  own.first = of.first;
  own.count = std::clamp<std::int64_t>(all.shape.tokens - of.first, 0, step);
  own.step = step;
  if (sizes_.far) own.rows = token_order().slots;
  const std::int64_t place = call_.shard.tokens ? call_.shard.rank() * step : 0;
  own.hidden = hidden + bytes(place, row);
  own.targets = targets + place * per_token;
  copy_local_tokens(all, own);
  if (call_.shard.tokens) {
    const CollectiveCalls::Together together(calls);
    calls.all_gather(own.hidden, hidden, bytes(step, row), all.stream);
    calls.all_gather(own.targets, targets, bytes(step * per_token, sizeof(*targets)), all.stream);
  }

  // Outputs are in the workspace, concatenated by rank.
  const ForwardOutputs outputs = all;
  static_cast<ForwardOutputs&>(all) = {};
  ForwardCall chunk = chunk_call(0, ranks * step);
  static_cast<ForwardOutputs&>(all) = outputs;
  if (of.first > 0) chunk.ranges = {};
  chunk.hidden = hidden;
  chunk.hidden_stride = all.shape.dim;
  chunk.targets = targets;
  chunk.int64_targets = true;
  chunk.sequence = 0;
  chunk.rows = nullptr;
  chunk.target_logit = at<float>(layout_.target_logit);
  chunk.bad_target = at<std::uint64_t>(layout_.shard.bad_target);
  return chunk;
}

void Engine::set_target_logits(ForwardCall& chunk, int buffer) {
  const int ranks = call_.shard.ranks();
  const std::int64_t slots = chunk.shape.tokens * chunk.shape.targets_per_token;
  auto* const logits = at<float>(layout_.shard.logits);
  auto* const given = at<float>(layout_.shard.given[buffer]);
  float* const mine = logits + call_.shard.rank() * slots;
  if (empty()) {
    fill_device(mine, 0, bytes(slots, sizeof(float)), chunk.stream);
  } else {
    kernel_.target_logits(chunk, mine);
  }
  call_.shard.calls->all_gather(mine, logits, bytes(slots, sizeof(float)), chunk.stream);
  merge_logits(logits, ranks, slots, given, chunk.stream);
  chunk.given_logits = given;
}

// Computes the outputs of a chunk over the global vocabulary.
void Engine::forward_sharded(ForwardCall& chunk) {
  const int ranks = call_.shard.ranks();
  auto* const records = at<TokenRecord>(layout_.shard.records);
  chunk.records = records + call_.shard.rank() * chunk.shape.tokens;
  empty() ? forward_nothing(chunk) : kernel_.forward(chunk);
  call_.shard.calls->all_gather(chunk.records, records,
                                bytes(chunk.shape.tokens, sizeof(TokenRecord)), chunk.stream);
  merge_records(chunk, records, ranks);
}

// Computes the coefficients of the local tokens of an assembled chunk. Sharded tokens' coefficients
// are then all-gathered.
void Engine::local_tokens(const ForwardCall& chunk, std::int64_t first,
                          const ChunkFunction& tokens) const {
  const ShardOperands& shard = call_.shard;
  const std::int64_t step = shard.tokens ? chunk.shape.tokens / shard.ranks() : chunk.shape.tokens;
  const std::int64_t row = shard.tokens ? shard.rank() * step : 0;
  const int per_token = chunk.shape.targets_per_token;
  const auto from = [&](auto* values, std::int64_t offset) {
    return values == nullptr ? nullptr : values + offset;
  };
  ForwardCall own = local_rows(first, step);
  own.lse = from(chunk.lse, row);
  own.log_prob = from(chunk.log_prob, row * per_token);
  own.target_logit = from(chunk.target_logit, row * per_token);
  own.weighted_sum = from(chunk.weighted_sum, row);
  own.entropy = from(chunk.entropy, row);
  own.argmax = from(chunk.argmax, row);
  if (!wants_gradients(features_)) {
    tokens(own, nullptr, nullptr);
    return local_outputs(own);
  }
  auto* const rows = at<RowCoefficients>(sizes_.far ? layout_.shard_far.token_coefficients
                                                    : layout_.gradients.rows);
  auto* const delta = at<float>(sizes_.far ? layout_.shard_far.delta : layout_.gradients.delta);
  if (!shard.tokens) {
    tokens(own, rows, delta);
    return local_outputs(own);
  }
  auto* const local_rows = at<RowCoefficients>(layout_.shard.local_rows);
  auto* const local_delta = at<float>(layout_.shard.local_delta);
  const std::size_t row_bytes = bytes(step, sizeof(RowCoefficients));
  const std::size_t delta_bytes = bytes(step * per_token, sizeof(float));
  fill_device(local_rows, 0, row_bytes, all.stream);
  fill_device(local_delta, 0, delta_bytes, all.stream);
  tokens(own, local_rows, local_delta);
  local_outputs(own);
  const std::int64_t count = chunk.shape.tokens;
  fill_device(rows + count, 0, bytes(padded_tokens(count) - count, sizeof(RowCoefficients)),
              all.stream);
  const CollectiveCalls::Together together(*shard.calls);
  shard.calls->all_gather(local_rows, rows, row_bytes, all.stream);
  shard.calls->all_gather(local_delta, delta, delta_bytes, all.stream);
}

// Copies outputs from the workspace to the caller's tensors.
void Engine::local_outputs(const ForwardCall& own) const {
  if (sizes_.far) {
    if (sizes_.audited > 0) keep_audited(own, far_audit(), {});
    return scatter_outputs(own, all);
  }
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

void Engine::backward_sharded(const ForwardCall& chunk, const ShardChunk& of) {
  const std::int64_t tokens = chunk.shape.tokens;
  void* const done = call_.shard.comm_stream->hidden_done.get();
  if (!empty()) {
    sizes_.far ? backward_local(chunk, of) : backward(chunk, of.first == 0);
  } else if (wants_hidden()) {
    fill_device(at<float>(layout_.gradients.d_hidden), 0,
                bytes(tokens * chunk.shape.dim, sizeof(float)), chunk.stream);
    record_event(done, chunk.stream);
  }
  if (sizes_.far && !sizes_.both) exchange_bounds(chunk, of);
  if (!wants_hidden()) return;
  stream_wait(comm_stream(), done);
  send_hidden(of, tokens);
  record_event(call_.shard.comm_stream->exchanged.get(), comm_stream());
  pending_ = of;
}

// Returns whether ranks exchange rounded sums of d_hidden: one rank computes the complete sum of
// each token.
bool Engine::sends_rounded() const {
  return !call_.shard.tokens && !sizes_.far && d_hidden_.dtype != DType::f32 &&
         !features_.accumulate;
}

// Sends partial sums of d_hidden to the ranks of their tokens. If all ranks have all tokens, each
// adds a part of them, and the sums are all-gathered into the receive buffer.
void Engine::send_hidden(const ShardChunk& of, std::int64_t tokens) const {
  CollectiveCalls& calls = *call_.shard.calls;
  const int ranks = call_.shard.ranks();
  const std::int64_t dim = all.shape.dim;
  const std::int64_t rows = (tokens + ranks - 1) / ranks;
  const std::int64_t numbers = rows * dim;
  auto* const slices = at<float>(layout_.gradients.d_hidden);
  auto* const received = at<float>(layout_.shard.received);
  calls.all_to_all(slices, received, bytes(numbers, sizeof(float)), comm_stream());
  if (call_.shard.tokens) return;
  if (!sends_rounded()) {
    add_slices(received, ranks, numbers, slices, comm_stream());
    return calls.all_gather(slices, received, bytes(numbers, sizeof(float)), comm_stream());
  }
  const std::size_t element = size_of(d_hidden_.dtype);
  round_slices(received, ranks, numbers, rows, dim, {slices, dim, d_hidden_.dtype, false},
               comm_stream());
  calls.all_gather(slices, received, bytes(numbers, element), comm_stream());
  const std::size_t stride = bytes(d_hidden_.stride, element);
  copy_rows_async({static_cast<std::byte*>(d_hidden_.data) + bytes(of.first, stride), stride},
                  {received, bytes(dim, element)}, bytes(dim, element),
                  static_cast<std::size_t>(tokens), comm_stream());
}

// Adds the partial sums in fp32, in the order of ranks, and rounds once.
void Engine::finish_hidden() {
  const ShardChunk of = std::exchange(pending_, ShardChunk());
  if (of.step == 0) return;
  stream_wait(all.stream, call_.shard.comm_stream->exchanged.get());
  const std::int64_t own = std::clamp<std::int64_t>(all.shape.tokens - of.first, 0, of.step);
  if (own == 0 || sends_rounded()) return;
  const std::int64_t dim = all.shape.dim;
  auto* const received = at<float>(layout_.shard.received);
  if (sizes_.far) {
    if (!call_.shard.tokens) return finish_far_hidden(received, of);
    auto* const sums = at<float>(layout_.gradients.d_hidden);
    add_slices(received, call_.shard.ranks(), of.step * dim, sums, all.stream);
    return finish_far_hidden(sums, of);
  }
  GradientOutput out = d_hidden_;
  out.data = static_cast<std::byte*>(out.data) + bytes(of.first * out.stride, size_of(out.dtype));
  if (call_.shard.tokens) {
    round_slices(received, call_.shard.ranks(), of.step * dim, own, dim, out, all.stream);
  } else {
    round_sums(received, own, dim, out, all.stream);
  }
}

const double* Engine::shares_of_ranks(const LossCall& loss) const {
  const ShardOperands& shard = call_.shard;
  if (!sharded() || (!shard.tokens && shard.replicas == nullptr)) return nullptr;
  gather_tokens_of_ranks();
  auto* const of_all = at<double>(layout_.shard.shares);
  double* const total = of_all + kMostRanks;
  sum_shares(loss, all, total);
  const auto sum_over = [&](CollectiveCalls& calls) {
    calls.all_gather(total, of_all, sizeof(double), all.stream);
    // Adds one number from each rank.
    add_slices(of_all, calls.communicator().size(), 1, total, all.stream);
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

// The chunk loop of a vocabulary-parallel call: each rank has a shard of the vocabulary, and all
// ranks go through the same chunks, the tokens that are processed together. With sharded tokens
// (sequence-parallel), a chunk has as many tokens from each rank, concatenated by rank. Everything
// is enqueued. A chunk takes:
//
//   1. With sharded tokens, an all-gather of hidden states and targets.
//   2. An all-gather of the targets' logits, which their sum over ranks merges: all shards take
//      their exponentials relative to the same logits.
//   3. The forward over the local shard. Its records, TokenRecord [tokens], hold what each token's
//      outputs need of this shard; an all-gather and merge_records give outputs of all shards.
//   4. The gradient coefficients of this rank's tokens. With sharded tokens, an all-gather.
//   5. The backward over the local shard. A reduce-scatter adds the partial sums of d_hidden over
//      the ranks. If all ranks have all tokens, an all-gather makes it an all-reduce.
//
// The reduce-scatter is an all-to-all and a sum in rank order, so that results are the same bits in
// every run.
//
// Collectives 1, 2 and 5 run on the communication stream, beside GEMMs of the call's stream: 1 and
// 2 are those of the next chunk, during this one's backward. So hidden, targets and merged logits
// are double-buffered. The other buffers have one copy, guarded by waits. Events of CommStream:
//
//   start        1 and 2 wait for it: the last work that reads the buffers they fill is done
//   ready        the forward waits for it: 1 and 2 are done
//   hidden_done  5 waits for it: the partial sums are complete, though d_weight is not
//   exchanged    the next backward, which overwrites these sums, waits for it: 5 is done
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "head/cuda/engine.h"
#include "kernels/device/far.h"
#include "kernels/device/shard.h"
#include "kernels/device/stream.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

}  // namespace

// Throws here, before the first collective: a kernel would throw later, and on this rank alone.
void Engine::require_aligned_operands() const {
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

// Throws on all ranks if their numbers of tokens or their orders differ. Sharded tokens may differ
// in number: each rank passes 0. Only the first check of a call exchanges anything, so a call may
// come here from global_denominator and once more from its loop.
void Engine::require_same_tokens() const {
  call_.shard.calls->require_same_tokens(call_.shard.tokens_sharded ? 0 : all.shape.tokens,
                                         common_order());
}

// Makes the call's stream wait for the communication stream, so that whoever waits for the former
// waits for both.
void Engine::join_comm_stream() const {
  record_event(comm().exchanged.get(), comm_stream());
  stream_wait(all.stream, comm().exchanged.get());
}

// Runs a call that receives into the group's exchange memory, which all plans of the group share:
// it waits for the last call that did, on any stream. Launches of a captured graph must be ordered
// by the caller.
void Engine::with_exchange_memory(const std::function<void()>& run) const {
  void* const released = comm().memory_released.get();
  if (released != nullptr) stream_wait_if_running(all.stream, released);
  const auto release = [&] {
    if (released != nullptr) record_event_if_running(released, all.stream);
  };
  try {
    run();
  } catch (...) {
    join_comm_stream();  // exchanges that were enqueued before the error still use the memory
    release();
    throw;
  }
  release();
}

void Engine::run_sharded(const ChunkFunction& set_coefficients) {
  with_exchange_memory([&] { run_chunks(set_coefficients); });
}

void Engine::run_chunks(const ChunkFunction& set_coefficients) {
  const ShardOperands& shard = call_.shard;
  const bool gradients = wants_gradients(features_);
  require_same_tokens();
  // With sharded tokens, chunks count tokens of each rank, up to the number in the plan: the most
  // that any rank has. All ranks have the same total, hence the same chunks and collectives.
  const std::int64_t parts = shard.tokens_sharded ? shard.ranks() : 1;
  const std::int64_t total = shard.tokens_sharded ? layout_tokens_ / parts : all.shape.tokens;
  if (assembles_chunks()) reset_bad_targets();
  if (sizes_.far) begin_shared_far();
  const auto chunk_from = [&](std::int64_t first) {
    const std::int64_t planned = first == 0 ? sizes_.first_chunk() : sizes_.chunk;
    const std::int64_t most = std::max<std::int64_t>(planned / parts, 1);
    return ShardChunk{first, std::min(most, total - first), 0};
  };
  ShardChunk now = chunk_from(0);
  record_event(comm().start.get(), all.stream);
  ForwardCall chunk = prefetch_chunk(now);
  for (;;) {  // a call without tokens runs one empty chunk, which initialises the outputs
    const bool last = now.first + now.count == total;
    last_chunk_ = last;
    stream_wait(all.stream, comm().ready.get());
    sizes_.far ? forward_shared_far(chunk, now.first == 0) : forward_sharded(chunk);
    if (assembles_chunks()) {
      set_local_coefficients(chunk, now, set_coefficients);
    } else {
      set_coefficients(chunk, gradients ? at<RowCoefficients>(layout_.gradients.rows) : nullptr,
                       gradients ? at<float>(layout_.gradients.delta) : nullptr);
    }
    ShardChunk next;
    ForwardCall next_chunk;
    if (!last) {
      next = chunk_from(now.first + now.count);
      next.buffer = 1 - now.buffer;
      record_event(comm().start.get(), all.stream);
      next_chunk = prefetch_chunk(next);
    }
    finish_hidden();  // before the backward overwrites the sums that may still be sent
    if (gradients && total > 0) backward_sharded(chunk, now);
    if (last) break;
    now = next;
    chunk = next_chunk;
  }
  finish_hidden();
  if (empty_shard()) return;
  if (gradients && total > 0) round_weights();
  if (total == 0) clear_weights();
}

// Enqueues on the communication stream, after all work of the call's stream so far, a chunk's
// inputs and the logits of its targets. Records `ready`. The call that it returns is for the call's
// stream.
ForwardCall Engine::prefetch_chunk(const ShardChunk& of) {
  stream_wait(comm_stream(), comm().start.get());
  ForwardCall chunk = assembles_chunks() ? assemble_chunk(of) : chunk_call(of.first, of.count);
  chunk.stream = comm_stream();
  merge_target_logits(chunk, of.buffer);
  record_event(comm().ready.get(), comm_stream());
  chunk.stream = all.stream;
  return chunk;
}

// Copies the inputs of a chunk into the workspace, in the far field's order, and all-gathers
// sharded tokens. Targets are -1 where ignored. Ranks with fewer tokens are padded with such ones.
ForwardCall Engine::assemble_chunk(const ShardChunk& of) const {
  CollectiveCalls& calls = *call_.shard.calls;
  const bool sharded_tokens = call_.shard.tokens_sharded;
  const std::int64_t ranks = sharded_tokens ? call_.shard.ranks() : 1;
  const int per_token = all.shape.targets_per_token;
  const std::size_t hidden_bytes = bytes(all.shape.dim, size_of(all.shape.dtype));
  auto* const hidden = at<std::byte>(layout_.shard.hidden[of.buffer]);
  auto* const targets = at<std::int64_t>(layout_.shard.targets[of.buffer]);
  LocalTokens own;
  own.first = of.first;
  own.count = std::clamp<std::int64_t>(all.shape.tokens - of.first, 0, of.count);
  own.padded = of.count;
  if (sizes_.far) own.rows = token_order().slots;
  const std::int64_t first_row = sharded_tokens ? call_.shard.rank() * of.count : 0;
  own.hidden = hidden + bytes(first_row, hidden_bytes);
  own.targets = targets + first_row * per_token;
  ForwardCall source = all;
  source.stream = comm_stream();
  copy_local_tokens(source, own);
  if (sharded_tokens) {
    const CollectiveCalls::Batch batch(calls);
    calls.all_gather(own.hidden, hidden, bytes(of.count, hidden_bytes), comm_stream());
    calls.all_gather(own.targets, targets, bytes(of.count * per_token, sizeof(*targets)),
                     comm_stream());
  }

  // The caller's outputs are of this rank's tokens: without them, those of the chunk go to the
  // workspace.
  static_cast<ForwardOutputs&>(source) = {};
  ForwardCall chunk = chunk_call(source, 0, ranks * of.count);
  if (of.first > 0) chunk.ranges = {};  // chunk_call took it for the first chunk
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

// Computes given_logits of a chunk, on its stream: the logits of its targets in any shard.
void Engine::merge_target_logits(ForwardCall& chunk, int buffer) const {
  const int ranks = call_.shard.ranks();
  const std::int64_t slots = chunk.shape.tokens * chunk.shape.targets_per_token;
  auto* const of_ranks = at<float>(layout_.shard.logits);
  auto* const merged = at<float>(layout_.shard.merged_logits[buffer]);
  float* const mine = of_ranks + call_.shard.rank() * slots;
  if (empty_shard()) {
    fill_device(mine, 0, bytes(slots, sizeof(float)), chunk.stream);
  } else {
    kernel_.target_logits(chunk, mine);
  }
  call_.shard.calls->all_gather(mine, of_ranks, bytes(slots, sizeof(float)), chunk.stream);
  merge_logits(of_ranks, ranks, slots, merged, chunk.stream);
  chunk.given_logits = merged;
}

// Computes the outputs of a chunk over the global vocabulary.
void Engine::forward_sharded(ForwardCall& chunk) {
  const int ranks = call_.shard.ranks();
  auto* const records = at<TokenRecord>(layout_.shard.records);
  chunk.records = records + call_.shard.rank() * chunk.shape.tokens;
  empty_shard() ? write_neutral_records(chunk) : kernel_.forward(chunk);
  call_.shard.calls->all_gather(chunk.records, records,
                                bytes(chunk.shape.tokens, sizeof(TokenRecord)), chunk.stream);
  merge_records(chunk, records, ranks);
}

// Runs the caller's function on this rank's tokens of an assembled chunk, and copies their outputs
// to the caller. Coefficients of sharded tokens are then all-gathered.
void Engine::set_local_coefficients(const ForwardCall& chunk, const ShardChunk& of,
                                    const ChunkFunction& set_coefficients) const {
  const ShardOperands& shard = call_.shard;
  const std::int64_t first_row = shard.tokens_sharded ? shard.rank() * of.count : 0;
  const int per_token = chunk.shape.targets_per_token;
  const auto from = [&](auto* values, std::int64_t offset) {
    return values == nullptr ? nullptr : values + offset;
  };
  ForwardCall own = call_of_local_tokens(of);
  own.lse = from(chunk.lse, first_row);
  own.log_prob = from(chunk.log_prob, first_row * per_token);
  own.target_logit = from(chunk.target_logit, first_row * per_token);
  own.weighted_sum = from(chunk.weighted_sum, first_row);
  own.entropy = from(chunk.entropy, first_row);
  own.argmax = from(chunk.argmax, first_row);
  if (!wants_gradients(features_)) {
    set_coefficients(own, nullptr, nullptr);
    return copy_local_outputs(own);
  }
  auto* const coefficients = at<RowCoefficients>(sizes_.far ? layout_.shard_far.token_coefficients
                                                            : layout_.gradients.rows);
  auto* const delta = at<float>(sizes_.far ? layout_.shard_far.delta : layout_.gradients.delta);
  if (!shard.tokens_sharded) {
    set_coefficients(own, coefficients, delta);
    return copy_local_outputs(own);
  }
  auto* const local_coefficients = at<RowCoefficients>(layout_.shard.local_coefficients);
  auto* const local_delta = at<float>(layout_.shard.local_delta);
  const std::size_t coefficient_bytes = bytes(of.count, sizeof(RowCoefficients));
  const std::size_t delta_bytes = bytes(of.count * per_token, sizeof(float));
  fill_device(local_coefficients, 0, coefficient_bytes, all.stream);  // of padding
  fill_device(local_delta, 0, delta_bytes, all.stream);
  set_coefficients(own, local_coefficients, local_delta);
  copy_local_outputs(own);
  const std::int64_t tokens = chunk.shape.tokens;
  fill_device(coefficients + tokens, 0,
              bytes(padded_tokens(tokens) - tokens, sizeof(RowCoefficients)), all.stream);
  const CollectiveCalls::Batch batch(*shard.calls);
  shard.calls->all_gather(local_coefficients, coefficients, coefficient_bytes, all.stream);
  shard.calls->all_gather(local_delta, delta, delta_bytes, all.stream);
}

// Copies outputs from the workspace to the caller's tensors.
void Engine::copy_local_outputs(const ForwardCall& own) const {
  if (sizes_.far) {
    if (sizes_.audited > 0) keep_audited(own, far_audit(), {});
    return scatter_outputs(own, all);
  }
  const int per_token = own.shape.targets_per_token;
  const auto copy = [&](auto* to, const auto* from, int each) {
    if (to == nullptr || own.shape.tokens == 0) return;
    copy_async(to + own.first_token * each, from, bytes(own.shape.tokens * each, sizeof(*to)),
               all.stream);
  };
  copy(all.lse, own.lse, 1);
  copy(all.log_prob, own.log_prob, per_token);
  copy(all.target_logit, own.target_logit, per_token);
  copy(all.weighted_sum, own.weighted_sum, 1);
  copy(all.entropy, own.entropy, 1);
  copy(all.argmax, own.argmax, 1);
}

// Computes the local shard's gradients, and enqueues the reduction of d_hidden for finish_hidden.
void Engine::backward_sharded(const ForwardCall& chunk, const ShardChunk& of) {
  const std::int64_t tokens = chunk.shape.tokens;
  void* const done = comm().hidden_done.get();
  if (!empty_shard()) {
    sizes_.far ? backward_local(chunk, of) : backward(chunk, of.first == 0);
  } else if (wants_hidden()) {
    fill_device(at<float>(layout_.gradients.d_hidden), 0,
                bytes(tokens * chunk.shape.dim, sizeof(float)), chunk.stream);
    record_event(done, chunk.stream);
  }
  if (sizes_.far && !sizes_.both) exchange_bounds(chunk, of);
  if (!wants_hidden()) return;
  stream_wait(comm_stream(), done);
  reduce_hidden(of, tokens);
  record_event(comm().exchanged.get(), comm_stream());
  pending_ = of;
}

// Returns whether each rank rounds its sums of d_hidden before their all-gather, which then moves
// half the bytes. It needs complete sums that nothing is added to or measured on.
bool Engine::gathers_rounded_sums() const {
  return !call_.shard.tokens_sharded && !sizes_.far && d_hidden_.dtype != DType::f32 &&
         !features_.accumulate;
}

// Reduces a chunk's d_hidden over the ranks, on the communication stream. With G ranks and C
// tokens, each rank sums R = ceil(C / G) of them:
//
//   partial   f32 [G, R, D], this shard's sums of all tokens, in the buffer of d_hidden's sums
//   received  f32 [G, R, D] after the all-to-all: each shard's sums of this rank's R tokens
//
// finish_hidden adds these if tokens are sharded: the R tokens are this rank's. Else they are added
// here, into the memory of `partial`, which has been sent, and `received` is reused:
//
//   sums      [R, D], f32 or rounded
//   received  [G R, D] after the all-gather: the complete sums, in the order of tokens
//
// Rounded sums are copied to d_hidden at once, f32 ones by finish_hidden.
void Engine::reduce_hidden(const ShardChunk& of, std::int64_t tokens) const {
  CollectiveCalls& calls = *call_.shard.calls;
  const int ranks = call_.shard.ranks();
  const std::int64_t dim = all.shape.dim;
  const std::int64_t rows = (tokens + ranks - 1) / ranks;
  const std::int64_t numbers = rows * dim;
  auto* const partial = at<float>(layout_.gradients.d_hidden);
  auto* const received = at<float>(layout_.shard.received);
  calls.all_to_all(partial, received, bytes(numbers, sizeof(float)), comm_stream());
  if (call_.shard.tokens_sharded) return;
  float* const sums = partial;
  if (!gathers_rounded_sums()) {
    add_slices(received, ranks, numbers, sums, comm_stream());
    return calls.all_gather(sums, received, bytes(numbers, sizeof(float)), comm_stream());
  }
  const GradientOutput rounded{.data = sums, .stride = dim, .dtype = d_hidden_.dtype, .add = false};
  round_slices(received, ranks, numbers, rows, dim, rounded, comm_stream());
  const std::size_t element = size_of(d_hidden_.dtype);
  calls.all_gather(sums, received, bytes(numbers, element), comm_stream());
  const std::size_t stride = bytes(d_hidden_.stride, element);
  copy_rows_async({static_cast<std::byte*>(d_hidden_.data) + bytes(of.first, stride), stride},
                  {received, bytes(dim, element)}, bytes(dim, element),
                  static_cast<std::size_t>(tokens), comm_stream());
}

// Waits for the pending chunk's reduction, if any, and writes its d_hidden: complete sums, or those
// of the ranks, which are added in fp32 in the order of ranks and rounded once.
void Engine::finish_hidden() {
  const ShardChunk of = std::exchange(pending_, ShardChunk());
  if (of.count == 0) return;
  stream_wait(all.stream, comm().exchanged.get());
  const std::int64_t own = std::clamp<std::int64_t>(all.shape.tokens - of.first, 0, of.count);
  if (own == 0 || gathers_rounded_sums()) return;
  const std::int64_t dim = all.shape.dim;
  auto* const received = at<float>(layout_.shard.received);
  if (sizes_.far) {
    if (!call_.shard.tokens_sharded) return finish_far_hidden(received, of);
    auto* const sums = at<float>(layout_.gradients.d_hidden);
    add_slices(received, call_.shard.ranks(), of.count * dim, sums, all.stream);
    return finish_far_hidden(sums, of);
  }
  GradientOutput out = d_hidden_;
  out.data = static_cast<std::byte*>(out.data) + bytes(of.first * out.stride, size_of(out.dtype));
  if (call_.shard.tokens_sharded) {
    round_slices(received, call_.shard.ranks(), of.count * dim, own, dim, out, all.stream);
  } else {
    round_sums(received, own, dim, out, all.stream);
  }
}

const double* Engine::global_denominator(const LossCall& loss) const {
  const ShardOperands& shard = call_.shard;
  if (!sharded() || (!shard.tokens_sharded && shard.replicas == nullptr)) return nullptr;
  require_same_tokens();
  auto* const of_ranks = at<double>(layout_.shard.denominators);
  double* const sum = of_ranks + kMostRanks;  // after the values of all ranks
  sum_shares(loss, all, sum);
  const auto sum_over = [&](CollectiveCalls& calls) {
    calls.all_gather(sum, of_ranks, sizeof(double), all.stream);
    add_slices(of_ranks, calls.communicator().size(), 1, sum, all.stream);
  };
  if (shard.tokens_sharded) sum_over(*shard.calls);
  // Each replica is a group with other tokens: its sum counts once.
  if (shard.replicas != nullptr) sum_over(*shard.replicas);
  return sum;
}

void Engine::finish_sharded(const LossCall& loss) const {
  auto* const losses = at<RankLoss>(layout_.shard.losses);
  RankLoss* const mine = losses + call_.shard.rank();
  sum_losses(loss, all, mine);
  call_.shard.calls->all_gather(mine, losses, sizeof(RankLoss), all.stream);
  finish_loss(loss, all, losses, call_.shard.ranks());
}

}  // namespace logitless::cuda

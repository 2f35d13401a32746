#include "head/cuda/vocab_parallel.h"

#include <algorithm>
#include <utility>

#include "head/cuda/exchange.h"
#include "kernels/device/shard.h"
#include "kernels/device/stream.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

}  // namespace

VocabParallel::VocabParallel(const Run& run, FarField* far) : run_(run), backward_(run) {
  if (far != nullptr) far_.emplace(run, *far);
  if (run.lists()) list_.emplace(run);
}

void VocabParallel::run(const ChunkFunction& set_coefficients) {
  with_exchange_memory(run_, [&] { run_chunks(set_coefficients); });
}

void VocabParallel::run_chunks(const ChunkFunction& set_coefficients) {
  const ShardOperands& shard = run_.call.shard;
  const bool gradients = run_.wants_gradients();
  require_same_tokens(run_);
  // With sharded tokens, chunks count tokens of each rank, up to the number in the plan: the most
  // that any rank has. All ranks have the same total, hence the same chunks and collectives.
  const std::int64_t parts = shard.tokens_sharded ? shard.ranks() : 1;
  const std::int64_t total =
      shard.tokens_sharded ? run_.plan_tokens() / parts : run_.all.shape.tokens;
  if (assembles_chunks()) reset_bad_targets(run_);
  if (far_) far_->begin();
  if (list_) list_->begin();
  const auto chunk_from = [&](std::int64_t first) {
    const std::int64_t planned = first == 0 ? run_.sizes.first_chunk() : run_.sizes.chunk;
    const std::int64_t most = std::max<std::int64_t>(planned / parts, 1);
    const std::int64_t count = std::min(most, total - first);
    return ShardChunk{first, count, 0, {first == 0, first + count == total}};
  };
  ShardChunk now = chunk_from(0);
  record_event(comm_of(run_).start.get(), run_.all.stream);
  ForwardCall chunk = prefetch_chunk(now);
  for (;;) {  // a call without tokens runs one empty chunk, which initialises the outputs
    stream_wait(run_.all.stream, comm_of(run_).ready.get());
    forward(chunk, now.place);
    if (assembles_chunks()) {
      set_local_coefficients(chunk, now, set_coefficients);
    } else {
      set_coefficients(chunk, run_.coefficients(), run_.delta());
    }
    ShardChunk next;
    ForwardCall next_chunk;
    if (!now.place.last) {
      next = chunk_from(now.first + now.count);
      next.buffer = 1 - now.buffer;
      record_event(comm_of(run_).start.get(), run_.all.stream);
      next_chunk = prefetch_chunk(next);
    }
    finish_hidden();  // before the backward overwrites the sums that may still be sent
    if (gradients && total > 0) backward(chunk, now);
    if (now.place.last) break;
    now = next;
    chunk = next_chunk;
  }
  finish_hidden();
  if (list_) list_->spread_hidden();
  if (run_.empty_shard()) return;
  if (gradients && total > 0) backward_.round_weights();
  if (total == 0) run_.clear_weights();
}

// Enqueues on the communication stream, after all work of the call's stream so far, a chunk's
// inputs and the logits of its targets. Records `ready`. The call that it returns is for the call's
// stream.
ForwardCall VocabParallel::prefetch_chunk(const ShardChunk& of) const {
  stream_wait(comm_stream_of(run_), comm_of(run_).start.get());
  ForwardCall chunk = assembles_chunks() ? assemble_chunk(of) : run_.chunk_call(of.first, of.count);
  chunk.stream = comm_stream_of(run_);
  merge_target_logits(chunk, of.buffer);
  record_event(comm_of(run_).ready.get(), comm_stream_of(run_));
  chunk.stream = run_.all.stream;
  return chunk;
}

// Copies the inputs of a chunk into the workspace, in the order of its tokens, and all-gathers
// sharded tokens. Targets are -1 where ignored. Ranks with fewer tokens are padded with such ones.
ForwardCall VocabParallel::assemble_chunk(const ShardChunk& of) const {
  CollectiveCalls& calls = *run_.call.shard.calls;
  const bool sharded_tokens = run_.call.shard.tokens_sharded;
  const std::int64_t ranks = sharded_tokens ? run_.call.shard.ranks() : 1;
  const int per_token = run_.all.shape.targets_per_token;
  const std::size_t hidden_bytes = bytes(run_.all.shape.dim, size_of(run_.all.shape.dtype));
  auto* const hidden = run_.at<std::byte>(run_.layout.shard.hidden[of.buffer]);
  auto* const targets = run_.at<std::int64_t>(run_.layout.shard.targets[of.buffer]);
  LocalTokens own;
  own.first = of.first;
  own.count = std::clamp<std::int64_t>(run_.all.shape.tokens - of.first, 0, of.count);
  own.padded = of.count;
  if (far_) own.rows = far_->token_rows();
  if (list_) own.rows = list_->rows();
  const std::int64_t first_row = sharded_tokens ? run_.call.shard.rank() * of.count : 0;
  own.hidden = hidden + bytes(first_row, hidden_bytes);
  own.targets = targets + first_row * per_token;
  ForwardCall source = run_.all;
  source.stream = comm_stream_of(run_);
  copy_local_tokens(source, own);
  if (sharded_tokens) {
    const CollectiveCalls::Batch batch(calls);
    calls.all_gather(own.hidden, hidden, bytes(of.count, hidden_bytes), comm_stream_of(run_));
    calls.all_gather(own.targets, targets, bytes(of.count * per_token, sizeof(*targets)),
                     comm_stream_of(run_));
  }

  // The caller's outputs are of this rank's tokens: without them, those of the chunk go to the
  // workspace.
  static_cast<ForwardOutputs&>(source) = {};
  ForwardCall chunk = run_.chunk_call(source, 0, ranks * of.count);
  if (of.first > 0) chunk.ranges = {};  // chunk_call took it for the first chunk
  chunk.hidden = hidden;
  chunk.hidden_stride = run_.all.shape.dim;
  chunk.targets = targets;
  chunk.int64_targets = true;
  chunk.sequence = 0;
  chunk.rows = nullptr;
  if (list_ && !sharded_tokens) chunk.original = list_->original(of.first);
  chunk.target_logit = run_.at<float>(run_.layout.target_logit);
  chunk.bad_target = run_.at<std::uint64_t>(run_.layout.shard.bad_target);
  return chunk;
}

// Computes given_logits of a chunk, on its stream: the logits of its targets in any shard.
void VocabParallel::merge_target_logits(ForwardCall& chunk, int buffer) const {
  const int ranks = run_.call.shard.ranks();
  const std::int64_t slots = chunk.shape.tokens * chunk.shape.targets_per_token;
  auto* const of_ranks = run_.at<float>(run_.layout.shard.logits);
  auto* const merged = run_.at<float>(run_.layout.shard.merged_logits[buffer]);
  float* const mine = of_ranks + run_.call.shard.rank() * slots;
  if (run_.empty_shard()) {
    fill_device(mine, 0, bytes(slots, sizeof(float)), chunk.stream);
  } else {
    run_.kernel.target_logits(chunk, mine);
  }
  run_.call.shard.calls->all_gather(mine, of_ranks, bytes(slots, sizeof(float)), chunk.stream);
  merge_logits(of_ranks, ranks, slots, merged, chunk.stream);
  chunk.given_logits = merged;
}

// Computes the outputs of a chunk over the global vocabulary.
void VocabParallel::forward(ForwardCall& chunk, const ChunkPlace& place) {
  const ShardOperands& shard = run_.call.shard;
  auto* const records = run_.at<TokenRecord>(run_.layout.shard.records);
  TokenRecord* const mine = records + shard.rank() * chunk.shape.tokens;
  if (far_) {
    far_->forward(chunk, place.first, mine);
  } else {
    chunk.records = mine;
    run_.empty_shard() ? write_neutral_records(chunk) : run_.kernel.forward(chunk);
  }
  shard.calls->all_gather(mine, records, bytes(chunk.shape.tokens, sizeof(TokenRecord)),
                          chunk.stream);
  merge_records(chunk, records, shard.ranks());
}

// Runs the caller's function on this rank's tokens of an assembled chunk, and copies their outputs
// to the caller. Coefficients of sharded tokens are then all-gathered.
void VocabParallel::set_local_coefficients(const ForwardCall& chunk, const ShardChunk& of,
                                           const ChunkFunction& set_coefficients) const {
  const ShardOperands& shard = run_.call.shard;
  const std::int64_t first_row = shard.tokens_sharded ? shard.rank() * of.count : 0;
  const int per_token = chunk.shape.targets_per_token;
  const auto from = [&](auto* values, std::int64_t offset) {
    return values == nullptr ? nullptr : values + offset;
  };
  ForwardCall own = far_ ? far_->call_of_local_tokens(of) : call_of_local_tokens(run_, of);
  if (list_) own.rows = list_->rows();
  own.lse = from(chunk.lse, first_row);
  own.lse_rest = from(chunk.lse_rest, first_row);
  own.log_prob = from(chunk.log_prob, first_row * per_token);
  own.target_logit = from(chunk.target_logit, first_row * per_token);
  own.weighted_sum = from(chunk.weighted_sum, first_row);
  own.entropy = from(chunk.entropy, first_row);
  own.argmax = from(chunk.argmax, first_row);
  if (!run_.wants_gradients()) {
    set_coefficients(own, nullptr, nullptr);
    return copy_local_outputs(own);
  }
  auto* const coefficients = run_.at<RowCoefficients>(
      far_ ? run_.layout.shard_far.token_coefficients : run_.layout.gradients.rows);
  auto* const delta =
      run_.at<float>(far_ ? run_.layout.shard_far.delta : run_.layout.gradients.delta);
  if (!shard.tokens_sharded) {
    set_coefficients(own, coefficients, delta);
    return copy_local_outputs(own);
  }
  auto* const local_coefficients = run_.at<RowCoefficients>(run_.layout.shard.local_coefficients);
  auto* const local_delta = run_.at<float>(run_.layout.shard.local_delta);
  const std::size_t coefficient_bytes = bytes(of.count, sizeof(RowCoefficients));
  const std::size_t delta_bytes = bytes(of.count * per_token, sizeof(float));
  fill_device(local_coefficients, 0, coefficient_bytes, run_.all.stream);  // of padding
  fill_device(local_delta, 0, delta_bytes, run_.all.stream);
  set_coefficients(own, local_coefficients, local_delta);
  copy_local_outputs(own);
  const std::int64_t tokens = chunk.shape.tokens;
  fill_device(coefficients + tokens, 0,
              bytes(padded_tokens(tokens) - tokens, sizeof(RowCoefficients)), run_.all.stream);
  const CollectiveCalls::Batch batch(*shard.calls);
  shard.calls->all_gather(local_coefficients, coefficients, coefficient_bytes, run_.all.stream);
  shard.calls->all_gather(local_delta, delta, delta_bytes, run_.all.stream);
}

// Copies outputs from the workspace to the caller's tensors.
void VocabParallel::copy_local_outputs(const ForwardCall& own) const {
  if (far_) return far_->give_outputs(own);
  if (list_) return scatter_outputs(own, run_.all);
  const int per_token = own.shape.targets_per_token;
  const auto copy = [&](auto* to, const auto* from, int each) {
    if (to == nullptr || own.shape.tokens == 0) return;
    copy_async(to + own.first_token * each, from, bytes(own.shape.tokens * each, sizeof(*to)),
               run_.all.stream);
  };
  copy(run_.all.lse, own.lse, 1);
  copy(run_.all.log_prob, own.log_prob, per_token);
  copy(run_.all.target_logit, own.target_logit, per_token);
  copy(run_.all.weighted_sum, own.weighted_sum, 1);
  copy(run_.all.entropy, own.entropy, 1);
  copy(run_.all.argmax, own.argmax, 1);
}

// Computes the local shard's gradients, and enqueues the reduction of d_hidden for finish_hidden.
void VocabParallel::backward(const ForwardCall& chunk, const ShardChunk& of) {
  const std::int64_t tokens = chunk.shape.tokens;
  void* const done = comm_of(run_).hidden_done.get();
  if (!run_.empty_shard()) {
    far_ ? far_->backward(chunk, of) : backward_.chunk(chunk, of.place);
  } else if (run_.wants_hidden()) {
    fill_device(run_.at<float>(run_.layout.gradients.d_hidden), 0,
                bytes(tokens * chunk.shape.dim, sizeof(float)), chunk.stream);
    record_event(done, chunk.stream);
  }
  if (far_ && !run_.sizes.both) far_->exchange_bounds(chunk, of);
  if (!run_.wants_hidden()) return;
  stream_wait(comm_stream_of(run_), done);
  reduce_hidden(of, tokens);
  record_event(comm_of(run_).exchanged.get(), comm_stream_of(run_));
  pending_ = of;
}

// Returns whether each rank rounds its sums of d_hidden before their all-gather, which then moves
// half the bytes. It needs complete sums that nothing is added to or measured on.
bool VocabParallel::gathers_rounded_sums() const {
  return !run_.call.shard.tokens_sharded && !far_ && run_.d_hidden.dtype != DType::f32 &&
         !run_.features.accumulate;
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
void VocabParallel::reduce_hidden(const ShardChunk& of, std::int64_t tokens) const {
  CollectiveCalls& calls = *run_.call.shard.calls;
  const int ranks = run_.call.shard.ranks();
  const std::int64_t dim = run_.all.shape.dim;
  const std::int64_t rows = (tokens + ranks - 1) / ranks;
  const std::int64_t numbers = rows * dim;
  auto* const partial = run_.at<float>(run_.layout.gradients.d_hidden);
  auto* const received = run_.at<float>(run_.layout.shard.received);
  calls.all_to_all(partial, received, bytes(numbers, sizeof(float)), comm_stream_of(run_));
  if (run_.call.shard.tokens_sharded) return;
  float* const sums = partial;
  if (!gathers_rounded_sums()) {
    add_slices(received, ranks, numbers, sums, comm_stream_of(run_));
    return calls.all_gather(sums, received, bytes(numbers, sizeof(float)), comm_stream_of(run_));
  }
  const GradientOutput rounded{
      .data = sums, .stride = dim, .dtype = run_.d_hidden.dtype, .add = false};
  round_slices(received, ranks, numbers, rows, dim, rounded, comm_stream_of(run_));
  const std::size_t element = size_of(run_.d_hidden.dtype);
  calls.all_gather(sums, received, bytes(numbers, element), comm_stream_of(run_));
  const std::size_t stride = bytes(run_.d_hidden.stride, element);
  copy_rows_async({static_cast<std::byte*>(run_.d_hidden.data) + bytes(of.first, stride), stride},
                  {received, bytes(dim, element)}, bytes(dim, element),
                  static_cast<std::size_t>(tokens), comm_stream_of(run_));
}

// Waits for the pending chunk's reduction, if any, and writes its d_hidden: complete sums, or those
// of the ranks, which are added in fp32 in the order of ranks and rounded once.
void VocabParallel::finish_hidden() {
  const ShardChunk of = std::exchange(pending_, ShardChunk());
  if (of.count == 0) return;
  stream_wait(run_.all.stream, comm_of(run_).exchanged.get());
  const std::int64_t own = std::clamp<std::int64_t>(run_.all.shape.tokens - of.first, 0, of.count);
  if (own == 0 || gathers_rounded_sums()) return;
  const std::int64_t dim = run_.all.shape.dim;
  auto* const received = run_.at<float>(run_.layout.shard.received);
  if (far_) {
    if (!run_.call.shard.tokens_sharded) return far_->finish_hidden(received, of);
    auto* const sums = run_.at<float>(run_.layout.gradients.d_hidden);
    add_slices(received, run_.call.shard.ranks(), of.count * dim, sums, run_.all.stream);
    return far_->finish_hidden(sums, of);
  }
  GradientOutput out = run_.d_hidden;
  out.data = static_cast<std::byte*>(out.data) + bytes(of.first * out.stride, size_of(out.dtype));
  if (run_.call.shard.tokens_sharded) {
    round_slices(received, run_.call.shard.ranks(), of.count * dim, own, dim, out, run_.all.stream);
  } else {
    round_sums(received, own, dim, out, run_.all.stream);
  }
}

}  // namespace logitless::cuda

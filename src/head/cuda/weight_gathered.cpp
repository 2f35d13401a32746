#include "head/cuda/weight_gathered.h"

#include <algorithm>

#include "head/cuda/backward.h"
#include "head/cuda/exchange.h"
#include "head/gathered_vocab.h"
#include "kernels/device/shard.h"
#include "kernels/device/stream.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

}  // namespace

void WeightGathered::run(const ChunkFunction& set_coefficients) {
  with_exchange_memory(run_, [&] { run_slices(set_coefficients); });
}

void WeightGathered::gather_bias() const {
  if (!run_.features.bias || run_.features.gathered_columns > 0) return;
  const ShardOperands& shard = run_.call.shard;
  auto* const biases = run_.at<float>(layout_.bias);
  float* const mine = biases + shard.rank() * bias_rows(run_.features);
  if (shard.vocab.rows() > 0)
    copy_async(mine, run_.all.bias, bytes(shard.vocab.rows(), sizeof(float)), run_.all.stream);
  shard.calls->all_gather(mine, biases, bytes(bias_rows(run_.features), sizeof(float)),
                          run_.all.stream);
}

std::byte* WeightGathered::buffer_of(std::int64_t slice, std::size_t offset,
                                     std::size_t each) const {
  const bool several = several_slices(run_.features, run_.sizes);
  return run_.at<std::byte>(offset) + (several ? bytes(slice % 2, each) : 0);
}
std::byte* WeightGathered::slice_at(std::int64_t slice) const {
  return buffer_of(slice, layout_.slice, bytes(run_.call.shard.ranks(), layout_.of_slice.bytes));
}
std::byte* WeightGathered::whole_at(std::int64_t slice) const {
  return buffer_of(slice, layout_.whole, layout_.of_whole.bias);
}
std::byte* WeightGathered::sums_at(std::int64_t slice) const {
  return buffer_of(slice, layout_.sums, bytes(run_.call.shard.ranks(), layout_.of_sums.bytes));
}

void WeightGathered::gather_slice(std::int64_t slice) const {
  comm_stream_waits(run_);
  const Stream stream = comm_stream_of(run_);
  const ShardOperands& shard = run_.call.shard;
  const SliceLayout layout = layout_.of_slice;
  const SliceRows own = rows_in_slice(slice, run_.sizes.slice, shard.vocab.rows());
  std::byte* const slices = slice_at(slice);
  std::byte* const mine = slices + bytes(shard.rank(), layout.bytes);
  const std::size_t element = size_of(run_.all.shape.dtype);
  const std::size_t row = bytes(run_.call.in.weight.size(1), element);
  const std::size_t stride = bytes(run_.all.weight_stride, element);
  const auto* const from =
      static_cast<const std::byte*>(run_.all.weight) + bytes(own.first, stride);
  const bool whole = stride == row && bytes(own.count, row) == layout.bytes;
  if (!whole)
    copy_rows_async({mine, row}, {from, stride}, row, static_cast<std::size_t>(own.count), stream);
  shard.calls->all_gather(whole ? from : mine, slices, layout.bytes, stream);
  shard.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
    copy_rows_async({whole_at(slice) + bytes(first, element), bytes(run_.all.shape.dim, element)},
                    {slices + bytes(rank, layout.bytes), bytes(count, element)},
                    bytes(count, element), static_cast<std::size_t>(own.count), stream);
  });
  record_event(comm_of(run_).ready.get(), stream);
}

// Returns whether one kernel call can take the slice: all ranks have all of its rows, contiguous,
// and in ascending order of ids, as the table must be.
bool WeightGathered::joins_ranks(std::int64_t slice) const {
  if (!rows_lie_together(run_.features) || run_.call.shard.gathered->tables) return false;
  const auto lie_together = [&](std::size_t of_rank, std::size_t element) {
    return of_rank == bytes(run_.sizes.slice * run_.all.shape.dim, element);
  };
  const std::vector<GatheredVocab::Of>& ranks = run_.call.shard.gathered->ranks;
  return lie_together(layout_.of_slice.bytes, size_of(run_.all.shape.dtype)) &&
         (!run_.features.d_weight || lie_together(layout_.of_sums.bytes, sizeof(float))) &&
         std::ranges::is_sorted(ranks, {}, &GatheredVocab::Of::first) &&
         std::ranges::all_of(ranks, [&](const GatheredVocab::Of& rank) {
           return rows_in_slice(slice, run_.sizes.slice, rank.rows).count == run_.sizes.slice;
         });
}

WeightGathered::SliceBlock WeightGathered::joined_block(std::int64_t slice) const {
  static_assert(std::size(VocabBegins().of) == kMostTogether);
  VocabBegins vocab_begins{.ranks = run_.call.shard.ranks()};
  std::int32_t* to = vocab_begins.of;
  for (const GatheredVocab::Of& rank : run_.call.shard.gathered->ranks)
    *to++ = static_cast<std::int32_t>(rank.first + slice * run_.sizes.slice);
  auto* const table = run_.at<std::int32_t>(layout_.vocab_ids);
  fill_vocab_ids(vocab_begins, run_.sizes.slice, table, run_.all.stream);
  return {.vocab_count = vocab_begins.ranks * run_.sizes.slice,
          .rows = slice_at(slice),
          .table = table};
}

// Calls function(block) for the ranks that have rows in the slice, in their order, or once for
// run_.all. Does nothing without tokens.
template <typename F>
void WeightGathered::each_block(std::int64_t slice, const F& function) const {
  if (run_.all.shape.tokens == 0) return;
  if (joins_ranks(slice)) return function(joined_block(slice));
  for (int r = 0; r < run_.call.shard.ranks(); ++r) {
    const SliceBlock block = block_of(r, slice);
    if (block.vocab_count > 0) function(block);
  }
}

WeightGathered::SliceBlock WeightGathered::block_of(int rank, std::int64_t slice) const {
  const GatheredVocab::Of& of_rank =
      run_.call.shard.gathered->ranks[static_cast<std::size_t>(rank)];
  const SliceLayout layout = layout_.of_slice;
  const SliceRows rows = rows_in_slice(slice, run_.sizes.slice, of_rank.rows);
  SliceBlock block{.rank = rank,
                   .vocab_begin = of_rank.first + rows.first,
                   .vocab_count = rows.count,
                   .rows = slice_at(slice) + bytes(rank, layout.bytes)};
  if (run_.features.gathered_columns > 0) {
    block.rows = whole_at(slice);
    if (run_.features.bias) block.bias = run_.all.bias + rows.first;
    return block;
  }
  if (run_.features.bias)
    block.bias = run_.at<float>(layout_.bias) + rank * bias_rows(run_.features) + rows.first;
  return block;
}

// Sets the operands of a call with all tokens and a block's rows.
void WeightGathered::set_block(ForwardCall& chunk, const SliceBlock& block) const {
  chunk.shape.vocab = block.vocab_count;
  chunk.weight = block.rows;
  chunk.weight_stride = run_.all.shape.dim;
  chunk.bias = block.bias;
  chunk.vocab_begin = block.vocab_begin;
  chunk.vocab_ids = block.table;
  if (run_.all.logit_weights != nullptr)
    chunk.logit_weights = run_.all.logit_weights + block.vocab_begin;
}

// Exponentials use the same reference for all entries, because the target's logit may be on another
// rank and arrive late.
void WeightGathered::forward_block(const SliceBlock& block, bool first) const {
  ForwardCall chunk = run_.chunk_call(0, run_.all.shape.tokens);
  std::uint64_t* const bad_target = chunk.bad_target;
  static_cast<ForwardOutputs&>(chunk) = {};
  chunk.bad_target = bad_target;
  chunk.records = run_.at<TokenRecord>(layout_.records);
  set_block(chunk, block);
  float* const found = run_.at<float>(layout_.found);
  run_.kernel.target_logits(chunk, found);
  chunk.given_logits = run_.at<float>(layout_.no_logits);
  run_.kernel.forward(chunk);
  absorb_records(chunk, found, first, run_.at<TokenRecord>(layout_.states),
                 run_.at<float>(layout_.logits));
}

// Adds a block's part of d_hidden and computes its d_weight and d_bias.
void WeightGathered::backward_block(const ForwardCall& tokens, const SliceBlock& block,
                                    std::byte* sums_of) {
  const bool by_columns = run_.features.gathered_columns > 0;
  const SliceSums sums = by_columns ? layout_.of_full_sums : layout_.of_sums;
  std::byte* const to =
      by_columns ? run_.at<std::byte>(layout_.full_sums) : sums_of + bytes(block.rank, sums.bytes);
  VocabGradients gradients;
  if (run_.features.d_weight) gradients.d_weight = {to, run_.all.shape.dim, DType::f32, false};
  gradients.bias_sums = reinterpret_cast<float*>(to + sums.d_bias);
  if (run_.features.d_bias)
    gradients.d_bias = {gradients.bias_sums, block.vocab_count, DType::f32, false};
  ForwardCall chunk = tokens;
  set_block(chunk, block);
  Backward(run_, gradients, adds_hidden_).chunk(chunk, {});
  adds_hidden_ = true;
}

// Splits the sums of a weight sharded by columns: each rank's part gets its columns, and all of
// d_bias.
void WeightGathered::exchange_sums(std::int64_t rows, std::byte* sums) const {
  const SliceSums whole = layout_.of_full_sums;
  const SliceSums part = layout_.of_sums;
  const std::byte* const from = run_.at<std::byte>(layout_.full_sums);
  if (run_.features.d_weight) {
    run_.call.shard.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
      const std::size_t row = bytes(count, sizeof(float));
      copy_rows_async(
          {sums + bytes(rank, part.bytes), row},
          {from + bytes(first, sizeof(float)), bytes(run_.all.shape.dim, sizeof(float))}, row,
          static_cast<std::size_t>(rows), run_.all.stream);
    });
  }
  if (!run_.features.d_bias) return;
  const std::size_t bias = bytes(rows, sizeof(float));
  for (int r = 0; r < run_.call.shard.ranks(); ++r)
    copy_async(sums + bytes(r, part.bytes) + part.d_bias, from + whole.d_bias, bias,
               run_.all.stream);
}

// Sends the sums of a slice to the ranks of its rows or columns.
void WeightGathered::send_sums(std::int64_t slice) const {
  const SliceSums layout = layout_.of_sums;
  if (layout.bytes == 0) return;
  const ShardOperands& shard = run_.call.shard;
  std::byte* const sums = sums_at(slice);
  if (run_.all.shape.tokens == 0) {
    fill_device(sums, 0, bytes(shard.ranks(), layout.bytes), run_.all.stream);
  } else if (run_.features.gathered_columns > 0) {
    exchange_sums(rows_in_slice(slice, run_.sizes.slice, shard.vocab.rows()).count, sums);
  }
  comm_stream_waits(run_);
  shard.calls->all_to_all(sums, run_.at<float>(layout_.received), layout.bytes,
                          comm_stream_of(run_));
  record_event(comm_of(run_).exchanged.get(), comm_stream_of(run_));
}

// Adds the received sums of all ranks in fp32, in their order, and rounds once.
void WeightGathered::add_sums(std::int64_t slice) const {
  const SliceSums layout = layout_.of_sums;
  if (layout.bytes == 0) return;
  const ShardOperands& shard = run_.call.shard;
  stream_wait(run_.all.stream, comm_of(run_).exchanged.get());
  const SliceRows own = rows_in_slice(slice, run_.sizes.slice, shard.vocab.rows());
  if (own.count == 0) return;
  auto* const mine = reinterpret_cast<float*>(sums_at(slice));  // already sent, so the buffer is
                                                                // free
  auto* const received = run_.at<float>(layout_.received);
  const auto numbers = static_cast<std::int64_t>(layout.bytes / sizeof(float));
  const std::int64_t columns = run_.call.in.weight.size(1);
  const auto from = [](GradientOutput out, std::int64_t offset) {
    out.data = static_cast<std::byte*>(out.data) + bytes(offset, size_of(out.dtype));
    return out;
  };
  const GradientOutput of_vocab = from(run_.d_weight, own.first * run_.d_weight.stride);
  if (!run_.features.d_bias && columns % 4 == 0)  // layout.bytes is a multiple of 16
    return round_slices(received, shard.ranks(), numbers, own.count, columns, of_vocab,
                        run_.all.stream);
  add_slices(received, shard.ranks(), numbers, mine, run_.all.stream);
  if (run_.features.d_weight) round_sums(mine, own.count, columns, of_vocab, run_.all.stream);
  if (run_.features.d_bias)
    round_sums(mine + layout.d_bias / sizeof(float), 1, own.count, from(run_.d_bias, own.first),
               run_.all.stream);
}

void WeightGathered::run_slices(const ChunkFunction& set_coefficients) {
  const std::int64_t slots = run_.all.shape.tokens * run_.all.shape.targets_per_token;
  const std::int64_t slices = slice_count(run_.features.gathered_rows, run_.sizes.slice);
  require_same_tokens(run_);
  reset_bad_targets(run_);
  fill_device(run_.at<float>(layout_.no_logits), 0xff, bytes(slots, sizeof(float)),
              run_.all.stream);
  gather_bias();
  bool first = true;
  void* const ready = comm_of(run_).ready.get();
  gather_slice(0);
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    stream_wait(run_.all.stream, ready);
    if (slice + 1 < slices) gather_slice(slice + 1);
    each_block(slice, [&](const SliceBlock& block) {
      forward_block(block, first);
      first = false;
    });
  }
  const ForwardCall chunk = run_.chunk_call(0, run_.all.shape.tokens);
  ForwardCall made = chunk;
  made.given_logits = run_.at<float>(layout_.logits);
  merge_records(made, run_.at<TokenRecord>(layout_.states), 1);
  set_coefficients(chunk, run_.coefficients(), run_.delta());
  if (!run_.wants_gradients()) return;

  for (std::int64_t slice = slices - 1; slice >= 0; --slice) {
    if (slice + 2 < slices) stream_wait(run_.all.stream, ready);
    if (slice > 0 && slice + 1 < slices) gather_slice(slice - 1);
    each_block(slice,
               [&](const SliceBlock& block) { backward_block(chunk, block, sums_at(slice)); });
    if (slice + 1 < slices) add_sums(slice + 1);
    send_sums(slice);
  }
  add_sums(0);
  if (run_.wants_hidden() && run_.all.shape.tokens > 0)
    round_sums(run_.at<float>(run_.layout.gradients.d_hidden), run_.all.shape.tokens,
               run_.all.shape.dim, run_.d_hidden, run_.all.stream);
}

}  // namespace logitless::cuda

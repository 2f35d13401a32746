// Weight-gathered calls: every rank computes its local tokens, all in one chunk, against the full
// vocabulary. Rows of the weight arrive slice by slice in the forward. They arrive once more in the
// backward in reverse order, where the last slices are still present. One kernel call takes one
// rank's rows of a slice. If nothing else travels with the rows, one call takes those of all ranks,
// with a table of their ids. If the weight is sharded by columns, each rank contributes its
// columns, and one call takes the slice. Everything is enqueued. All ranks go through the same
// slices, however many tokens they have.
//
// Exchanges run on the communication stream: the next slice arrives, and the sums of the last one
// are sent, while the current one is computed. With several slices, both are double-buffered, so
// that the backward finds the last two.
#include <algorithm>

#include "core/check.h"
#include "head/cuda/engine.h"
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

// The rows of one rank in a slice, or of all ranks.
struct Engine::SliceBlock {
  int rank = 0;
  std::int64_t vocab_begin = 0, vocab_count = 0;
  const std::byte* rows = nullptr;  // [rows of the block, D]
  const float* bias = nullptr;
  const std::int32_t* table = nullptr;  // [rows of the block], with rows of all ranks
};

void Engine::gather_bias() const {
  if (!features_.bias || features_.gathered_columns > 0) return;
  const ShardOperands& shard = call_.shard;
  auto* const biases = at<float>(layout_.gathered.bias);
  float* const mine = biases + shard.rank() * bias_rows(features_);
  if (shard.vocab.rows() > 0)
    copy_async(mine, all.bias, bytes(shard.vocab.rows(), sizeof(float)), all.stream);
  shard.calls->all_gather(mine, biases, bytes(bias_rows(features_), sizeof(float)), all.stream);
}

// Orders subsequent work on the communication stream after everything enqueued on the call's stream
// so far.
void Engine::comm_stream_waits() const {
  record_event(comm().start.get(), all.stream);
  stream_wait(comm_stream(), comm().start.get());
}

std::byte* Engine::slice_at(std::int64_t slice) const {
  const std::size_t each = layout_.gathered.of_slice.bytes;
  return at<std::byte>(layout_.gathered.slice) +
         (several_slices(features_, sizes_) ? bytes(slice % 2 * call_.shard.ranks(), each) : 0);
}
std::byte* Engine::whole_at(std::int64_t slice) const {
  const std::size_t each = layout_.gathered.of_whole.bias;
  return base_ + layout_.gathered.whole +
         (several_slices(features_, sizes_) ? bytes(slice % 2, each) : 0);
}
std::byte* Engine::sums_at(std::int64_t slice) const {
  const std::size_t each = layout_.gathered.of_sums.bytes;
  return base_ + layout_.gathered.sums +
         (several_slices(features_, sizes_) ? bytes(slice % 2 * call_.shard.ranks(), each) : 0);
}

void Engine::gather_slice(std::int64_t slice) const {
  comm_stream_waits();
  const Stream stream = comm_stream();
  const ShardOperands& shard = call_.shard;
  const SliceLayout layout = layout_.gathered.of_slice;
  const SliceRows own = rows_in_slice(slice, sizes_.slice, shard.vocab.rows());
  std::byte* const slices = slice_at(slice);
  std::byte* const mine = slices + bytes(shard.rank(), layout.bytes);
  const std::size_t element = size_of(all.shape.dtype);
  const std::size_t row = bytes(call_.in.weight.size(1), element);
  const std::size_t stride = bytes(all.weight_stride, element);
  const auto* const from = static_cast<const std::byte*>(all.weight) + bytes(own.first, stride);
  const bool whole = stride == row && bytes(own.count, row) == layout.bytes;
  if (!whole)
    copy_rows_async({mine, row}, {from, stride}, row, static_cast<std::size_t>(own.count), stream);
  shard.calls->all_gather(whole ? from : mine, slices, layout.bytes, stream);
  shard.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
    copy_rows_async({whole_at(slice) + bytes(first, element), bytes(all.shape.dim, element)},
                    {slices + bytes(rank, layout.bytes), bytes(count, element)},
                    bytes(count, element), static_cast<std::size_t>(own.count), stream);
  });
  record_event(comm().ready.get(), stream);
}

// Returns whether one kernel call can take the slice: all ranks have all of its rows, contiguous,
// and in ascending order of ids, as the table must be.
bool Engine::joins_ranks(std::int64_t slice) const {
  if (!rows_lie_together(features_) || call_.shard.gathered->tables) return false;
  const auto lie_together = [&](std::size_t of_rank, std::size_t element) {
    return of_rank == bytes(sizes_.slice * all.shape.dim, element);
  };
  const std::vector<GatheredVocab::Of>& ranks = call_.shard.gathered->ranks;
  return lie_together(layout_.gathered.of_slice.bytes, size_of(all.shape.dtype)) &&
         (!features_.d_weight || lie_together(layout_.gathered.of_sums.bytes, sizeof(float))) &&
         std::ranges::is_sorted(ranks, {}, &GatheredVocab::Of::first) &&
         std::ranges::all_of(ranks, [&](const GatheredVocab::Of& rank) {
           return rows_in_slice(slice, sizes_.slice, rank.rows).count == sizes_.slice;
         });
}

Engine::SliceBlock Engine::joined_block(std::int64_t slice) const {
  static_assert(std::size(VocabBegins().of) == kMostTogether);
  VocabBegins vocab_begins{.ranks = call_.shard.ranks()};
  std::int32_t* to = vocab_begins.of;
  for (const GatheredVocab::Of& rank : call_.shard.gathered->ranks)
    *to++ = static_cast<std::int32_t>(rank.first + slice * sizes_.slice);
  auto* const table = at<std::int32_t>(layout_.gathered.vocab_ids);
  fill_vocab_ids(vocab_begins, sizes_.slice, table, all.stream);
  return {
      .vocab_count = vocab_begins.ranks * sizes_.slice, .rows = slice_at(slice), .table = table};
}

// Calls function(block) for the ranks that have rows in the slice, in their order, or once for all.
// Does nothing without tokens.
template <typename F>
void Engine::each_block(std::int64_t slice, const F& function) {
  if (all.shape.tokens == 0) return;
  if (joins_ranks(slice)) return function(joined_block(slice));
  for (int r = 0; r < call_.shard.ranks(); ++r) {
    const SliceBlock block = block_of(r, slice);
    if (block.vocab_count > 0) function(block);
  }
}

Engine::SliceBlock Engine::block_of(int rank, std::int64_t slice) const {
  const GatheredVocab::Of& of_rank = call_.shard.gathered->ranks[static_cast<std::size_t>(rank)];
  const SliceLayout layout = layout_.gathered.of_slice;
  const SliceRows rows = rows_in_slice(slice, sizes_.slice, of_rank.rows);
  SliceBlock block{.rank = rank,
                   .vocab_begin = of_rank.first + rows.first,
                   .vocab_count = rows.count,
                   .rows = slice_at(slice) + bytes(rank, layout.bytes)};
  if (features_.gathered_columns > 0) {
    block.rows = whole_at(slice);
    if (features_.bias) block.bias = all.bias + rows.first;
    return block;
  }
  if (features_.bias)
    block.bias = at<float>(layout_.gathered.bias) + rank * bias_rows(features_) + rows.first;
  return block;
}

// Sets the operands of a call with all tokens and a block's rows.
void Engine::set_block(ForwardCall& chunk, const SliceBlock& block) const {
  chunk.shape.vocab = block.vocab_count;
  chunk.weight = block.rows;
  chunk.weight_stride = all.shape.dim;
  chunk.bias = block.bias;
  chunk.vocab_begin = block.vocab_begin;
  chunk.vocab_ids = block.table;
  if (all.logit_weights != nullptr) chunk.logit_weights = all.logit_weights + block.vocab_begin;
}

// Exponentials use the same reference for all entries, because the target's logit may be on another
// rank and arrive late.
void Engine::forward_block(const SliceBlock& block, bool first) const {
  const GatheredLayout& layout = layout_.gathered;
  ForwardCall chunk = chunk_call(0, all.shape.tokens);
  std::uint64_t* const bad_target = chunk.bad_target;
  static_cast<ForwardOutputs&>(chunk) = {};
  chunk.bad_target = bad_target;
  chunk.records = at<TokenRecord>(layout.records);
  set_block(chunk, block);
  float* const found = at<float>(layout.found);
  kernel_.target_logits(chunk, found);
  chunk.given_logits = at<float>(layout.no_logits);
  kernel_.forward(chunk);
  absorb_records(chunk, found, first, at<TokenRecord>(layout.states), at<float>(layout.logits));
}

// Adds a block's part of d_hidden and computes its d_weight and d_bias.
void Engine::backward_block(const ForwardCall& tokens, const SliceBlock& block,
                            std::byte* sums_of) {
  const bool by_columns = features_.gathered_columns > 0;
  const SliceSums sums = by_columns ? layout_.gathered.of_full_sums : layout_.gathered.of_sums;
  std::byte* const to =
      by_columns ? base_ + layout_.gathered.full_sums : sums_of + bytes(block.rank, sums.bytes);
  d_weight_ = {};
  if (features_.d_weight) d_weight_ = {to, all.shape.dim, DType::f32, false};
  bias_sums_ = reinterpret_cast<float*>(to + sums.d_bias);
  d_bias_ = {};
  if (features_.d_bias) d_bias_ = {bias_sums_, block.vocab_count, DType::f32, false};
  ForwardCall chunk = tokens;
  set_block(chunk, block);
  backward(chunk, true);
  adds_hidden_ = true;
}

// Splits the sums of a weight sharded by columns: each rank's part gets its columns, and all of
// d_bias.
void Engine::exchange_sums(std::int64_t rows, std::byte* sums) const {
  const SliceSums whole = layout_.gathered.of_full_sums;
  const SliceSums part = layout_.gathered.of_sums;
  const std::byte* const from = base_ + layout_.gathered.full_sums;
  if (features_.d_weight) {
    call_.shard.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
      const std::size_t row = bytes(count, sizeof(float));
      copy_rows_async({sums + bytes(rank, part.bytes), row},
                      {from + bytes(first, sizeof(float)), bytes(all.shape.dim, sizeof(float))},
                      row, static_cast<std::size_t>(rows), all.stream);
    });
  }
  if (!features_.d_bias) return;
  const std::size_t bias = bytes(rows, sizeof(float));
  for (int r = 0; r < call_.shard.ranks(); ++r)
    copy_async(sums + bytes(r, part.bytes) + part.d_bias, from + whole.d_bias, bias, all.stream);
}

// Sends the sums of a slice to the ranks of its rows or columns.
void Engine::send_sums(std::int64_t slice) const {
  const SliceSums layout = layout_.gathered.of_sums;
  if (layout.bytes == 0) return;
  const ShardOperands& shard = call_.shard;
  std::byte* const sums = sums_at(slice);
  if (all.shape.tokens == 0) {
    fill_device(sums, 0, bytes(shard.ranks(), layout.bytes), all.stream);
  } else if (features_.gathered_columns > 0) {
    exchange_sums(rows_in_slice(slice, sizes_.slice, shard.vocab.rows()).count, sums);
  }
  comm_stream_waits();
  shard.calls->all_to_all(sums, at<float>(layout_.gathered.received), layout.bytes, comm_stream());
  record_event(comm().exchanged.get(), comm_stream());
}

// Adds the received sums of all ranks in fp32, in their order, and rounds once.
void Engine::add_sums(std::int64_t slice, const GradientOutput& d_weight,
                      const GradientOutput& d_bias) const {
  const SliceSums layout = layout_.gathered.of_sums;
  if (layout.bytes == 0) return;
  const ShardOperands& shard = call_.shard;
  stream_wait(all.stream, comm().exchanged.get());
  const SliceRows own = rows_in_slice(slice, sizes_.slice, shard.vocab.rows());
  if (own.count == 0) return;
  auto* const mine = reinterpret_cast<float*>(sums_at(slice));  // already sent, so the buffer is
                                                                // free
  auto* const received = at<float>(layout_.gathered.received);
  const auto numbers = static_cast<std::int64_t>(layout.bytes / sizeof(float));
  const std::int64_t columns = call_.in.weight.size(1);
  const auto from = [](GradientOutput out, std::int64_t offset) {
    out.data = static_cast<std::byte*>(out.data) + bytes(offset, size_of(out.dtype));
    return out;
  };
  const GradientOutput of_vocab = from(d_weight, own.first * d_weight.stride);
  if (!features_.d_bias && columns % 4 == 0)  // layout.bytes is a multiple of 16
    return round_slices(received, shard.ranks(), numbers, own.count, columns, of_vocab, all.stream);
  add_slices(received, shard.ranks(), numbers, mine, all.stream);
  if (features_.d_weight) round_sums(mine, own.count, columns, of_vocab, all.stream);
  if (features_.d_bias)
    round_sums(mine + layout.d_bias / sizeof(float), 1, own.count, from(d_bias, own.first),
               all.stream);
}

void Engine::run_gathered(const ChunkFunction& set_coefficients) {
  with_exchange_memory([&] { run_slices(set_coefficients); });
}

void Engine::run_slices(const ChunkFunction& set_coefficients) {
  const bool gradients = wants_gradients(features_);
  const std::int64_t slots = all.shape.tokens * all.shape.targets_per_token;
  const std::int64_t slices = slice_count(features_.gathered_rows, sizes_.slice);
  require_same_tokens();
  reset_bad_targets();
  fill_device(at<float>(layout_.gathered.no_logits), 0xff, bytes(slots, sizeof(float)), all.stream);
  gather_bias();
  bool first = true;
  void* const ready = comm().ready.get();
  gather_slice(0);
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    stream_wait(all.stream, ready);
    if (slice + 1 < slices) gather_slice(slice + 1);
    each_block(slice, [&](const SliceBlock& block) {
      forward_block(block, first);
      first = false;
    });
  }
  last_chunk_ = true;
  const ForwardCall chunk = chunk_call(0, all.shape.tokens);
  ForwardCall made = chunk;
  made.given_logits = at<float>(layout_.gathered.logits);
  merge_records(made, at<TokenRecord>(layout_.gathered.states), 1);
  set_coefficients(chunk, gradients ? at<RowCoefficients>(layout_.gradients.rows) : nullptr,
                   gradients ? at<float>(layout_.gradients.delta) : nullptr);
  if (!gradients) return;

  const GradientOutput d_weight = d_weight_, d_bias = d_bias_;
  for (std::int64_t slice = slices - 1; slice >= 0; --slice) {
    if (slice + 2 < slices) stream_wait(all.stream, ready);
    if (slice > 0 && slice + 1 < slices) gather_slice(slice - 1);
    each_block(slice,
               [&](const SliceBlock& block) { backward_block(chunk, block, sums_at(slice)); });
    if (slice + 1 < slices) add_sums(slice + 1, d_weight, d_bias);
    send_sums(slice);
  }
  add_sums(0, d_weight, d_bias);
  if (wants_hidden() && all.shape.tokens > 0)
    round_sums(at<float>(layout_.gradients.d_hidden), all.shape.tokens, all.shape.dim, d_hidden_,
               all.stream);
}

}  // namespace logitless::cuda

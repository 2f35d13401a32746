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
#include "head/gathered_words.h"
#include "kernels/device_shard.h"
#include "kernels/device_stream.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

// The full bias is gathered at once.
PieceLayout layout_of_piece(const HeadShape& shape, HeadFeatures features, std::int64_t rows) {
  features.bias = false;
  return piece_layout(shape, features, rows, false);
}

}  // namespace

// The rows of one rank in a slice, or of all ranks.
struct Engine::PieceBlock {
  int rank = 0;
  std::int64_t first_word = 0, words = 0;
  const std::byte* rows = nullptr;  // [rows of the block, D]
  const float* bias = nullptr;
  const std::int32_t* table = nullptr;  // [rows of the block], with rows of all ranks
};

void Engine::gather_bias() const {
  if (!features_.bias || features_.gathered_columns > 0) return;
  const ShardOperands& shard = call_.shard;
  auto* const biases = at<float>(layout_.gathered.bias);
  float* const mine = biases + shard.rank() * bias_rows(features_);
  if (shard.words.rows() > 0)
    copy_async(mine, all.bias, bytes(shard.words.rows(), sizeof(float)), all.stream);
  shard.calls->all_gather(mine, biases, bytes(bias_rows(features_), sizeof(float)), all.stream);
}

// Orders subsequent work on the communication stream after everything enqueued on the call's stream
// so far.
void Engine::lane_follows() const {
  record_event(call_.shard.lane->start.get(), all.stream);
  stream_wait(lane(), call_.shard.lane->start.get());
}

std::byte* Engine::piece_at(std::int64_t piece) const {
  const std::size_t each = layout_of_piece(call_.shape, features_, sizes_.piece).bytes;
  return at<std::byte>(layout_.gathered.piece) +
         (several_pieces(features_, sizes_) ? bytes(piece % 2 * call_.shard.ranks(), each) : 0);
}
std::byte* Engine::whole_at(std::int64_t piece) const {
  const std::size_t each = whole_piece(call_.shape, features_, sizes_.piece).bias;
  return base_ + layout_.gathered.whole +
         (several_pieces(features_, sizes_) ? bytes(piece % 2, each) : 0);
}
std::byte* Engine::sums_at(std::int64_t piece) const {
  const std::size_t each = piece_sums(call_.shape, features_, sizes_.piece).bytes;
  return base_ + layout_.gathered.sums +
         (several_pieces(features_, sizes_) ? bytes(piece % 2 * call_.shard.ranks(), each) : 0);
}

void Engine::gather_piece(std::int64_t piece) const {
  lane_follows();
  const Stream stream = lane();
  const ShardOperands& shard = call_.shard;
  const PieceLayout layout = layout_of_piece(call_.shape, features_, sizes_.piece);
  const PieceRows own = rows_in_piece(piece, sizes_.piece, shard.words.rows());
  std::byte* const pieces = piece_at(piece);
  std::byte* const mine = pieces + bytes(shard.rank(), layout.bytes);
  const std::size_t element = size_of(all.shape.dtype);
  const std::size_t row = bytes(call_.in.weight.size(1), element);
  const std::size_t stride = bytes(all.weight_stride, element);
  const auto* const from = static_cast<const std::byte*>(all.weight) + bytes(own.first, stride);
  const bool whole = stride == row && bytes(own.count, row) == layout.bytes;
  if (!whole)
    copy_rows_async({mine, row}, {from, stride}, row, static_cast<std::size_t>(own.count), stream);
  shard.calls->all_gather(whole ? from : mine, pieces, layout.bytes, stream);
  shard.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
    copy_rows_async({whole_at(piece) + bytes(first, element), bytes(all.shape.dim, element)},
                    {pieces + bytes(rank, layout.bytes), bytes(count, element)},
                    bytes(count, element), static_cast<std::size_t>(own.count), stream);
  });
  record_event(shard.lane->ready.get(), stream);
}

// Returns whether one kernel call can take the slice: all ranks have all of its rows, contiguous,
// and in ascending order of ids, as the table must be.
bool Engine::joins_ranks(std::int64_t piece) const {
  if (!rows_lie_together(features_) || call_.shard.gathered->tables) return false;
  const auto lie_together = [&](std::size_t of_rank, std::size_t element) {
    return of_rank == bytes(sizes_.piece * all.shape.dim, element);
  };
  const std::vector<GatheredWords::Of>& ranks = call_.shard.gathered->ranks;
  return lie_together(layout_of_piece(call_.shape, features_, sizes_.piece).bytes,
                      size_of(all.shape.dtype)) &&
         (!features_.d_weight ||
          lie_together(piece_sums(call_.shape, features_, sizes_.piece).bytes, sizeof(float))) &&
         std::ranges::is_sorted(ranks, {}, &GatheredWords::Of::first) &&
         std::ranges::all_of(ranks, [&](const GatheredWords::Of& rank) {
           return rows_in_piece(piece, sizes_.piece, rank.rows).count == sizes_.piece;
         });
}

Engine::PieceBlock Engine::joined_block(std::int64_t piece) const {
  static_assert(std::size(FirstWords().of) == kMostTogether);
  FirstWords words{.ranks = call_.shard.ranks()};
  std::int32_t* to = words.of;
  for (const GatheredWords::Of& rank : call_.shard.gathered->ranks)
    *to++ = static_cast<std::int32_t>(rank.first + piece * sizes_.piece);
  auto* const table = at<std::int32_t>(layout_.gathered.words);
  number_words(words, sizes_.piece, table, all.stream);
  return {.words = words.ranks * sizes_.piece, .rows = piece_at(piece), .table = table};
}

// Calls function(block) for the ranks that have rows in the slice, in their order, or once for all.
// Does nothing without tokens.
template <typename F>
void Engine::each_block(std::int64_t piece, const F& function) {
  if (all.shape.tokens == 0) return;
  if (joins_ranks(piece)) return function(joined_block(piece));
  for (int r = 0; r < call_.shard.ranks(); ++r) {
    const PieceBlock block = block_of(r, piece);
    if (block.words > 0) function(block);
  }
}

Engine::PieceBlock Engine::block_of(int rank, std::int64_t piece) const {
  const GatheredWords::Of& of_rank = call_.shard.gathered->ranks[static_cast<std::size_t>(rank)];
  const PieceLayout layout = layout_of_piece(call_.shape, features_, sizes_.piece);
  const PieceRows rows = rows_in_piece(piece, sizes_.piece, of_rank.rows);
  PieceBlock block{.rank = rank,
                   .first_word = of_rank.first + rows.first,
                   .words = rows.count,
                   .rows = piece_at(piece) + bytes(rank, layout.bytes)};
  if (features_.gathered_columns > 0) {
    block.rows = whole_at(piece);
    if (features_.bias) block.bias = all.bias + rows.first;
    return block;
  }
  if (features_.bias)
    block.bias = at<float>(layout_.gathered.bias) + rank * bias_rows(features_) + rows.first;
  return block;
}

// Sets the operands of a call with all tokens and a block's rows.
void Engine::set_block(ForwardCall& chunk, const PieceBlock& block) const {
  chunk.shape.vocab = block.words;
  chunk.weight = block.rows;
  chunk.weight_stride = all.shape.dim;
  chunk.bias = block.bias;
  chunk.first_word = block.first_word;
  chunk.word_table = block.table;
  if (all.omega != nullptr) chunk.omega = all.omega + block.first_word;
}

// Exponentials use the same reference for all entries, because the target's logit may be on another
// rank and arrive late.
void Engine::forward_block(const PieceBlock& block, bool first) const {
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
void Engine::backward_block(const ForwardCall& tokens, const PieceBlock& block,
                            std::byte* sums_of) {
  const bool by_columns = features_.gathered_columns > 0;
  const PieceSums sums = by_columns ? whole_sums(call_.shape, features_, sizes_.piece)
                                    : piece_sums(call_.shape, features_, sizes_.piece);
  std::byte* const to =
      by_columns ? base_ + layout_.gathered.whole_sums : sums_of + bytes(block.rank, sums.bytes);
  d_weight_ = {};
  if (features_.d_weight) d_weight_ = {to, all.shape.dim, DType::f32, false};
  bias_sums_ = reinterpret_cast<float*>(to + sums.d_bias);
  d_bias_ = {};
  if (features_.d_bias) d_bias_ = {bias_sums_, block.words, DType::f32, false};
  ForwardCall chunk = tokens;
  set_block(chunk, block);
  backward(chunk, true);
  adds_hidden_ = true;
}

// Splits the sums of a weight sharded by columns: each rank's part gets its columns, and all of
// d_bias.
void Engine::deal_sums(std::int64_t rows, std::byte* sums) const {
  const PieceSums whole = whole_sums(call_.shape, features_, sizes_.piece);
  const PieceSums part = piece_sums(call_.shape, features_, sizes_.piece);
  const std::byte* const from = base_ + layout_.gathered.whole_sums;
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
void Engine::send_sums(std::int64_t piece) const {
  const PieceSums layout = piece_sums(call_.shape, features_, sizes_.piece);
  if (layout.bytes == 0) return;
  const ShardOperands& shard = call_.shard;
  std::byte* const sums = sums_at(piece);
  if (all.shape.tokens == 0) {
    fill_device(sums, 0, bytes(shard.ranks(), layout.bytes), all.stream);
  } else if (features_.gathered_columns > 0) {
    deal_sums(rows_in_piece(piece, sizes_.piece, shard.words.rows()).count, sums);
  }
  lane_follows();
  shard.calls->all_to_all(sums, at<float>(layout_.gathered.received), layout.bytes, lane());
  record_event(shard.lane->exchanged.get(), lane());
}

// Adds the received sums of all ranks in fp32, in their order, and rounds once.
void Engine::add_sums(std::int64_t piece, const GradientOutput& d_weight,
                      const GradientOutput& d_bias) const {
  const PieceSums layout = piece_sums(call_.shape, features_, sizes_.piece);
  if (layout.bytes == 0) return;
  const ShardOperands& shard = call_.shard;
  stream_wait(all.stream, shard.lane->exchanged.get());
  const PieceRows own = rows_in_piece(piece, sizes_.piece, shard.words.rows());
  if (own.count == 0) return;
  auto* const mine = reinterpret_cast<float*>(sums_at(piece));  // already sent, so the buffer is
                                                                // free
  auto* const received = at<float>(layout_.gathered.received);
  const auto numbers = static_cast<std::int64_t>(layout.bytes / sizeof(float));
  const std::int64_t columns = call_.in.weight.size(1);
  const auto from = [](GradientOutput out, std::int64_t offset) {
    out.data = static_cast<std::byte*>(out.data) + bytes(offset, size_of(out.dtype));
    return out;
  };
  const GradientOutput of_words = from(d_weight, own.first * d_weight.stride);
  if (!features_.d_bias && columns % 4 == 0)  // layout.bytes is a multiple of 16
    return round_pieces(received, shard.ranks(), numbers, own.count, columns, of_words, all.stream);
  add_pieces(received, shard.ranks(), numbers, mine, all.stream);
  if (features_.d_weight) round_sums(mine, own.count, columns, of_words, all.stream);
  if (features_.d_bias)
    round_sums(mine + layout.d_bias / sizeof(float), 1, own.count, from(d_bias, own.first),
               all.stream);
}

void Engine::run_gathered(const ChunkFunction& tokens) {
  with_lane([&] { run_pieces(tokens); });
}

void Engine::run_pieces(const ChunkFunction& tokens) {
  const bool gradients = wants_gradients(features_);
  const std::int64_t slots = all.shape.tokens * all.shape.targets_per_token;
  const std::int64_t pieces = piece_count(features_.gathered_rows, sizes_.piece);
  meet_tokens();
  fill_device(statistics(), 0xff, 2 * sizeof(std::uint64_t), all.stream);
  fill_device(at<float>(layout_.gathered.no_logits), 0xff, bytes(slots, sizeof(float)), all.stream);
  gather_bias();
  bool first = true;
  void* const ready = call_.shard.lane->ready.get();
  gather_piece(0);
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    stream_wait(all.stream, ready);
    if (piece + 1 < pieces) gather_piece(piece + 1);
    each_block(piece, [&](const PieceBlock& block) {
      forward_block(block, first);
      first = false;
    });
  }
  last_chunk_ = true;
  const ForwardCall chunk = chunk_call(0, all.shape.tokens);
  ForwardCall made = chunk;
  made.given_logits = at<float>(layout_.gathered.logits);
  merge_records(made, at<TokenRecord>(layout_.gathered.states), 1);
  tokens(chunk, gradients ? at<RowCoefficients>(layout_.gradients.rows) : nullptr,
         gradients ? at<float>(layout_.gradients.delta) : nullptr);
  if (!gradients) return;

  const GradientOutput d_weight = d_weight_, d_bias = d_bias_;
  for (std::int64_t piece = pieces - 1; piece >= 0; --piece) {
    if (piece + 2 < pieces) stream_wait(all.stream, ready);
    if (piece > 0 && piece + 1 < pieces) gather_piece(piece - 1);
    each_block(piece,
               [&](const PieceBlock& block) { backward_block(chunk, block, sums_at(piece)); });
    if (piece + 1 < pieces) add_sums(piece + 1, d_weight, d_bias);
    send_sums(piece);
  }
  add_sums(0, d_weight, d_bias);
  if (wants_hidden() && all.shape.tokens > 0)
    round_sums(at<float>(layout_.gradients.d_hidden), all.shape.tokens, all.shape.dim, d_hidden_,
               all.stream);
}

}  // namespace logitless::cuda

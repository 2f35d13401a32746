// Weights move: every rank runs its own tokens, all in one chunk, against all words, whose rows
// come to it piece by piece, in the forward and in the backward, last piece first, where the last
// one is still there. Each rank's rows of a piece are a call of the kernel. Everything is enqueued;
// all ranks go through the same pieces, however many tokens they have.
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

// The bias of all words is gathered at once.
PieceLayout layout_of_piece(const HeadShape& shape, HeadFeatures features, std::int64_t rows) {
  features.bias = false;
  return piece_layout(shape, features, rows, false);
}

}  // namespace

// Rows of one rank in a piece.
struct Engine::PieceBlock {
  int rank = 0;
  std::int64_t first_word = 0, words = 0;
  const std::byte* rows = nullptr;  // [words, D]
  const float* bias = nullptr;
};

void Engine::gather_bias() const {
  if (!features_.bias) return;
  const ShardOperands& shard = call_.shard;
  auto* const biases = at<float>(layout_.gathered.bias);
  float* const mine = biases + shard.rank() * bias_rows(features_);
  if (shard.words.rows() > 0)
    copy_async(mine, all.bias, bytes(shard.words.rows(), sizeof(float)), all.stream);
  shard.calls->all_gather(mine, biases, bytes(bias_rows(features_), sizeof(float)), all.stream);
}

void Engine::gather_piece(std::int64_t piece) const {
  const ShardOperands& shard = call_.shard;
  const PieceLayout layout = layout_of_piece(call_.shape, features_, sizes_.piece);
  const PieceRows own = rows_in_piece(piece, sizes_.piece, shard.words.rows());
  std::byte* const pieces = base_ + layout_.gathered.piece;
  std::byte* const mine = pieces + bytes(shard.rank(), layout.bytes);
  const std::size_t element = size_of(all.shape.dtype);
  const std::size_t row = bytes(all.shape.dim, element);
  const std::size_t stride = bytes(all.weight_stride, element);
  const auto* const from = static_cast<const std::byte*>(all.weight) + bytes(own.first, stride);
  const bool whole = stride == row && bytes(own.count, row) == layout.bytes;
  if (!whole)
    copy_rows_async(mine, from, stride, row, static_cast<std::size_t>(own.count), all.stream);
  shard.calls->all_gather(whole ? from : mine, pieces, layout.bytes, all.stream);
}

// function(block) for the ranks that have rows in the piece, in their order; none without tokens.
template <typename F>
void Engine::each_block(std::int64_t piece, const F& function) {
  if (all.shape.tokens == 0) return;
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
                   .rows = base_ + layout_.gathered.piece + bytes(rank, layout.bytes)};
  if (features_.bias)
    block.bias = at<float>(layout_.gathered.bias) + rank * bias_rows(features_) + rows.first;
  return block;
}

// Operands of a call of all tokens and a block's words.
void Engine::set_block(ForwardCall& chunk, const PieceBlock& block) const {
  chunk.shape.vocab = block.words;
  chunk.weight = block.rows;
  chunk.weight_stride = all.shape.dim;
  chunk.bias = block.bias;
  chunk.first_word = block.first_word;
  if (all.omega != nullptr) chunk.omega = all.omega + block.first_word;
}

// References are the same for every word: those of targets are on other ranks, and known late.
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

// d_hidden of all words so far, and a block's d_weight and d_bias.
void Engine::backward_block(const ForwardCall& tokens, const PieceBlock& block) {
  const PieceSums sums = piece_sums(call_.shape, features_, sizes_.piece);
  std::byte* const to = base_ + layout_.gathered.sums + bytes(block.rank, sums.bytes);
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

// The sums of a piece go to the ranks of its rows, which add those of all ranks in their order and
// in fp32, and round once.
void Engine::add_sums(std::int64_t piece, const GradientOutput& d_weight,
                      const GradientOutput& d_bias) const {
  const PieceSums layout = piece_sums(call_.shape, features_, sizes_.piece);
  if (layout.bytes == 0) return;
  const ShardOperands& shard = call_.shard;
  const int ranks = shard.ranks();
  std::byte* const sums = base_ + layout_.gathered.sums;
  auto* const received = at<float>(layout_.gathered.received);
  if (all.shape.tokens == 0) fill_device(sums, 0, bytes(ranks, layout.bytes), all.stream);
  shard.calls->all_to_all(sums, received, layout.bytes, all.stream);
  const PieceRows own = rows_in_piece(piece, sizes_.piece, shard.words.rows());
  if (own.count == 0) return;
  auto* const mine = reinterpret_cast<float*>(sums);  // sent, and free
  add_pieces(received, ranks, static_cast<std::int64_t>(layout.bytes / sizeof(float)), mine,
             all.stream);
  const auto round = [&](GradientOutput out, const float* from, std::int64_t offset,
                         std::int64_t rows, std::int64_t columns) {
    out.data = static_cast<std::byte*>(out.data) + bytes(offset, size_of(out.dtype));
    round_sums(from, rows, columns, out, all.stream);
  };
  if (features_.d_weight)
    round(d_weight, mine, own.first * d_weight.stride, own.count, all.shape.dim);
  if (features_.d_bias)
    round(d_bias, mine + layout.d_bias / sizeof(float), own.first, 1, own.count);
}

void Engine::run_gathered(const ChunkFunction& tokens) {
  const bool gradients = wants_gradients(features_);
  const std::int64_t slots = all.shape.tokens * all.shape.targets_per_token;
  const std::int64_t pieces = piece_count(features_.gathered_rows, sizes_.piece);
  meet_tokens();
  fill_device(statistics(), 0xff, 2 * sizeof(std::uint64_t), all.stream);
  fill_device(at<float>(layout_.gathered.no_logits), 0xff, bytes(slots, sizeof(float)), all.stream);
  gather_bias();
  bool first = true;
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    gather_piece(piece);
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
    if (piece + 1 < pieces) gather_piece(piece);
    each_block(piece, [&](const PieceBlock& block) { backward_block(chunk, block); });
    add_sums(piece, d_weight, d_bias);
  }
  if (wants_hidden() && all.shape.tokens > 0)
    round_sums(at<float>(layout_.gradients.d_hidden), all.shape.tokens, all.shape.dim, d_hidden_,
               all.stream);
}

}  // namespace logitless::cuda

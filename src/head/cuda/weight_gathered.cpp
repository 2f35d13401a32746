// A weight-gathered call on a GPU. All local tokens are one chunk, and everything is enqueued. If
// nothing else travels with the rows, one kernel call takes those of all ranks, with a table of
// their ids.
//
// Exchanges run on the communication stream: the next slice arrives, and the sums of the last one
// are sent, while the current one is computed. With several slices, both are double-buffered, so
// that the backward finds the last two.
#include "head/schedule/weight_gathered.h"

#include <algorithm>
#include <optional>

#include "head/cuda/backward.h"
#include "head/cuda/exchange.h"
#include "head/cuda/listed_tokens.h"
#include "kernels/device/shard.h"
#include "kernels/device/stream.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

// The verbs of the schedule.
class Slices {
 public:
  static constexpr int kAhead = 1;

  explicit Slices(const Run& run)
      : run_(run), shard_(run.call.shard), layout_(run.layout.gathered) {
    if (run.lists()) list_.emplace(run);
  }

  const SliceParts& parts() const { return layout_.parts; }
  SliceBuffers buffers() const {
    return {.slice = run_.at<std::byte>(layout_.slice),
            .whole = run_.at<std::byte>(layout_.whole),
            .sums = run_.at<std::byte>(layout_.sums),
            .full_sums = run_.at<std::byte>(layout_.full_sums),
            .received = run_.at<std::byte>(layout_.received)};
  }
  bool has_tokens() const { return run_.all.shape.tokens > 0; }
  bool wants_gradients() const { return run_.wants_gradients(); }

  void begin() const {
    require_same_tokens(run_);
    reset_bad_targets(run_);
    if (list_) {
      list_->begin();
      list_->gather(tokens());
    }
    fill_device(run_.at<float>(layout_.no_logits), 0xff, bytes(slots(), sizeof(float)),
                run_.all.stream);
    gather_bias();
  }

  const std::byte* put_rows(const SliceRows& own, std::byte* to) const {
    const std::size_t element = size_of(run_.all.shape.dtype);
    const std::size_t row = bytes(run_.call.in.weight.size(1), element);
    const std::size_t stride = bytes(run_.all.weight_stride, element);
    const auto* const from =
        static_cast<const std::byte*>(run_.all.weight) + bytes(own.first, stride);
    if (stride == row && bytes(own.count, row) == layout_.parts.slice.bytes) return from;
    copy_rows(to, row, from, stride, row, own.count, CopyWith::exchanges);
    return to;
  }
  void copy_rows(std::byte* to, std::size_t to_stride, const std::byte* from,
                 std::size_t from_stride, std::size_t row_bytes, std::int64_t rows,
                 CopyWith with) const {
    const Stream stream = with == CopyWith::exchanges ? comm_stream_of(run_) : run_.all.stream;
    if (rows == 1) return copy_async(to, from, row_bytes, stream);
    copy_rows_async({to, to_stride}, {from, from_stride}, row_bytes, static_cast<std::size_t>(rows),
                    stream);
  }
  void clear(std::byte* to, std::size_t count) const { fill_device(to, 0, count, run_.all.stream); }

  void begin_exchange() const { comm_stream_waits(run_); }
  void all_gather(const std::byte* mine, std::byte* all, std::size_t each) const {
    shard_.calls->all_gather(mine, all, each, comm_stream_of(run_));
  }
  void all_to_all(const std::byte* slices, std::byte* slices_of_all, std::size_t each) const {
    shard_.calls->all_to_all(slices, slices_of_all, each, comm_stream_of(run_));
  }
  void slice_sent() const { record_event(comm_of(run_).ready.get(), comm_stream_of(run_)); }
  void wait_for_slice() const { stream_wait(run_.all.stream, comm_of(run_).ready.get()); }
  void sums_sent() const { record_event(comm_of(run_).exchanged.get(), comm_stream_of(run_)); }
  void wait_for_sums() const { stream_wait(run_.all.stream, comm_of(run_).exchanged.get()); }

  std::optional<SliceBlock> block_of_all(std::int64_t slice, const std::byte* rows) const;
  void forward(const SliceBlock& block, bool first) const;
  void finish_forward(const ChunkFunction& set_coefficients) const;
  void backward(const SliceBlock& block, std::byte* sums, bool first) const;
  void add_sums(const SliceRows& own, std::byte* sums) const;
  void finish_hidden() const {
    if (!run_.wants_hidden() || !has_tokens()) return;
    round_sums(run_.at<float>(run_.layout.gradients.d_hidden), run_.all.shape.tokens,
               run_.all.shape.dim, run_.d_hidden, run_.all.stream, list_ ? list_->rows() : nullptr);
  }

 private:
  std::int64_t slots() const { return run_.all.shape.tokens * run_.all.shape.targets_per_token; }
  ForwardCall tokens() const {
    const std::int64_t count = run_.all.shape.tokens;
    return list_ ? list_->chunk_call(0, count) : run_.chunk_call(0, count);
  }
  void gather_bias() const;
  bool joins_ranks(std::int64_t slice) const;
  void set_block(ForwardCall& chunk, const SliceBlock& block) const;

  const Run& run_;
  const ShardOperands& shard_;
  const GatheredLayout& layout_;
  std::optional<ListedTokens> list_;
};

// Gathers the full bias at once.
void Slices::gather_bias() const {
  if (!run_.features.bias || run_.features.gathered_columns > 0) return;
  auto* const biases = run_.at<float>(layout_.bias);
  float* const mine = biases + shard_.rank() * bias_rows(run_.features);
  if (shard_.vocab.rows() > 0)
    copy_async(mine, run_.all.bias, bytes(shard_.vocab.rows(), sizeof(float)), run_.all.stream);
  shard_.calls->all_gather(mine, biases, bytes(bias_rows(run_.features), sizeof(float)),
                           run_.all.stream);
}

// Returns whether one kernel call can take the slice: all ranks have all of its rows, contiguous,
// and in ascending order of ids, as the table must be.
bool Slices::joins_ranks(std::int64_t slice) const {
  if (!rows_lie_together(run_.features) || shard_.gathered->tables) return false;
  const std::int64_t each = run_.sizes.slice;
  const auto lie_together = [&](std::size_t of_rank, std::size_t element) {
    return of_rank == bytes(each * run_.all.shape.dim, element);
  };
  const std::vector<GatheredVocab::Of>& ranks = shard_.gathered->ranks;
  return lie_together(layout_.parts.slice.bytes, size_of(run_.all.shape.dtype)) &&
         (!run_.features.d_weight || lie_together(layout_.parts.sums.bytes, sizeof(float))) &&
         std::ranges::is_sorted(ranks, {}, &GatheredVocab::Of::first) &&
         std::ranges::all_of(ranks, [&](const GatheredVocab::Of& rank) {
           return rows_in_slice(slice, each, rank.rows).count == each;
         });
}

std::optional<SliceBlock> Slices::block_of_all(std::int64_t slice, const std::byte* rows) const {
  if (!joins_ranks(slice)) return {};
  static_assert(std::size(VocabBegins().of) == kMostTogether);
  const std::int64_t each = run_.sizes.slice;
  VocabBegins vocab_begins{.ranks = shard_.ranks()};
  std::int32_t* to = vocab_begins.of;
  for (const GatheredVocab::Of& rank : shard_.gathered->ranks)
    *to++ = static_cast<std::int32_t>(rank.first + slice * each);
  auto* const table = run_.at<std::int32_t>(layout_.vocab_ids);
  fill_vocab_ids(vocab_begins, each, table, run_.all.stream);
  SliceBlock block;
  block.vocab_count = vocab_begins.ranks * each;
  block.rows = rows;
  block.vocab_ids = table;
  return block;
}

// Sets the operands of a call with all tokens and a block's rows.
void Slices::set_block(ForwardCall& chunk, const SliceBlock& block) const {
  chunk.shape.vocab = block.vocab_count;
  chunk.weight = block.rows;
  chunk.weight_stride = run_.all.shape.dim;
  chunk.bias = nullptr;
  if (run_.features.bias) {
    const float* const of_rank =
        run_.features.gathered_columns > 0
            ? run_.all.bias
            : run_.at<float>(layout_.bias) + block.rank * bias_rows(run_.features);
    chunk.bias = of_rank + block.of_rank.first;
  }
  chunk.vocab_begin = block.vocab_begin;
  chunk.vocab_ids = block.vocab_ids;
  if (run_.all.logit_weights != nullptr)
    chunk.logit_weights = run_.all.logit_weights + block.vocab_begin;
}

// Exponentials use the same reference for all entries, because the target's logit may be on another
// rank and arrive late.
void Slices::forward(const SliceBlock& block, bool first) const {
  ForwardCall chunk = tokens();
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

void Slices::finish_forward(const ChunkFunction& set_coefficients) const {
  const ForwardCall chunk = tokens();
  ForwardCall made = chunk;
  made.given_logits = run_.at<float>(layout_.logits);
  merge_records(made, run_.at<TokenRecord>(layout_.states), 1);
  set_coefficients(chunk, run_.coefficients(), run_.delta());
  if (list_) scatter_outputs(chunk, run_.all);
}

void Slices::backward(const SliceBlock& block, std::byte* sums, bool first) const {
  const SliceParts& parts = layout_.parts;
  const std::size_t bias =
      run_.features.gathered_columns > 0 ? parts.full_sums.d_bias : parts.sums.d_bias;
  VocabGradients to;
  if (run_.features.d_weight) to.d_weight = {sums, run_.all.shape.dim, DType::f32, false};
  to.bias_sums = reinterpret_cast<float*>(sums + bias);
  if (run_.features.d_bias) to.d_bias = {to.bias_sums, block.vocab_count, DType::f32, false};
  ForwardCall chunk = tokens();
  set_block(chunk, block);
  Backward(run_, to, !first).chunk(chunk, {});
}

// Adds the received sums of all ranks in fp32, in their order, and rounds once.
void Slices::add_sums(const SliceRows& own, std::byte* sums) const {
  const SliceSums& layout = layout_.parts.sums;
  auto* const mine = reinterpret_cast<float*>(sums);
  auto* const received = run_.at<float>(layout_.received);
  const auto numbers = static_cast<std::int64_t>(layout.bytes / sizeof(float));
  const std::int64_t columns = run_.call.in.weight.size(1);
  const auto from = [](GradientOutput out, std::int64_t offset) {
    if (out.data != nullptr) out.data = advance(out.data, offset, out.dtype);
    return out;
  };
  const GradientOutput d_weight = from(run_.d_weight, own.first * run_.d_weight.stride);
  const GradientOutput d_bias = from(run_.d_bias, own.first);
  if (!run_.features.d_bias && columns % 4 == 0)  // layout.bytes is a multiple of 16
    return round_slices(received, shard_.ranks(), numbers, own.count, columns, d_weight,
                        run_.all.stream);
  add_slices(received, shard_.ranks(), numbers, mine, run_.all.stream);
  if (run_.features.d_weight) round_sums(mine, own.count, columns, d_weight, run_.all.stream);
  if (run_.features.d_bias)
    round_sums(mine + layout.d_bias / sizeof(float), 1, own.count, d_bias, run_.all.stream);
}

}  // namespace

void run_weight_gathered(const Run& run, const ChunkFunction& set_coefficients) {
  with_exchange_memory(run, [&] {
    Slices slices(run);
    WeightGathered(slices, run.call, run.sizes.slice).run(set_coefficients);
  });
}

}  // namespace logitless::cuda

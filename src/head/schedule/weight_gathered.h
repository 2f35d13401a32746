// Weight-gathered calls, for all devices: every rank computes its local tokens against the full
// vocabulary. Rows of the weight arrive slice by slice in the forward. They arrive once more in the
// backward in reverse order, where the last slices are still present. One kernel call takes one
// rank's rows of a slice, or those of all ranks. Its results of each token are merged in the order
// of slices and ranks. Gradients of the rows return to their rank, which adds the sums of all
// ranks' tokens in rank order. If the weight is sharded by columns, each rank contributes its
// columns of a slice's rows, and one kernel call takes the slice. All ranks go through the same
// slices in the same order, however many tokens they have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "head/gathered_vocab.h"
#include "head/head_call.h"

namespace logitless {

// The rows of one rank in a slice, or of all ranks.
struct SliceBlock {
  int rank = 0;
  SliceRows of_rank;  // its local rows
  std::int64_t vocab_begin = 0, vocab_count = 0;
  const std::byte* rows = nullptr;  // [vocab_count, D]
  const std::byte* part = nullptr;  // the rank's contribution to the slice
  // [vocab_count]; null: the entries are consecutive from vocab_begin on.
  const std::int32_t* vocab_ids = nullptr;
};

// Memory of a call. Of the first three there are Device::kAhead + 1, if there are several slices.
struct SliceBuffers {
  std::byte* slice = nullptr;      // [ranks] of parts.slice
  std::byte* whole = nullptr;      // with weights by columns: the rows with all columns
  std::byte* sums = nullptr;       // [ranks] of parts.sums: sent to all ranks
  std::byte* full_sums = nullptr;  // with weights by columns: sums of all columns
  std::byte* received = nullptr;   // [ranks] of parts.sums: received from all ranks
};

// Says whether a copy runs with a call's exchanges, beside its kernels, or between its kernels.
enum class CopyWith : std::uint8_t { exchanges, kernels };

// The protocol. A Device enqueues, or computes, what its verbs say:
//
// - kAhead: the slices that arrive while another one is computed
// - parts(), buffers(), has_tokens(), wants_gradients()
// - begin(): the call's work before the first slice
// - put_rows(rows, to): returns this rank's part of a slice, `to` or the weight itself
// - copy_rows(to, to_stride, from, from_stride, row_bytes, rows, with), clear(to, bytes)
// - begin_exchange(): the next exchange sends what is computed so far
// - all_gather(mine, all, bytes), all_to_all(slices, slices_of_all, bytes)
// - slice_sent(), wait_for_slice(), sums_sent(), wait_for_sums()
// - block_of_all(slice, rows): the rows of all ranks, if one kernel call can take them
// - forward(block, first): merges a block's results into those of the tokens
// - finish_forward(function): outputs of the tokens, and their gradient coefficients
// - backward(block, sums, first): adds to d_hidden; `sums` gets the gradients of the block's rows
// - add_sums(rows, sums): adds the received sums to the gradients of this rank's rows; `sums`, one
//   part, is scratch
// - finish_hidden()
template <class Device>
class WeightGathered {
 public:
  WeightGathered(Device& device, const HeadCall& call, std::int64_t slice_rows)
      : device_(device),
        shard_(call.shard),
        features_(call.plan->features),
        parts_(device.parts()),
        buffers_(device.buffers()),
        dim_(call.shape.dim),
        element_(size_of(call.shape.dtype)),
        slice_rows_(slice_rows) {}

  template <typename Function>
  void run(const Function& set_coefficients) {
    constexpr int kAhead = Device::kAhead;
    static_assert(kAhead == 0 || kAhead == 1);
    const std::int64_t slices = slice_count(features_.gathered_rows, slice_rows_);
    device_.begin();
    if (kAhead > 0) gather(0);
    bool first = true;
    for (std::int64_t slice = 0; slice < slices; ++slice) {
      if (kAhead > 0) device_.wait_for_slice();
      if (slice + kAhead < slices) gather(slice + kAhead);
      each_block(slice, [&](const SliceBlock& block) {
        device_.forward(block, first);
        first = false;
      });
    }
    device_.finish_forward(set_coefficients);
    if (!device_.wants_gradients()) return;

    first = true;
    for (std::int64_t slice = slices - 1; slice >= 0; --slice) {
      const bool arrives = slice + kAhead + 1 < slices;  // the last slices are still there
      if (kAhead > 0 && arrives) device_.wait_for_slice();
      if (slice + 1 < slices && slice >= kAhead) gather(slice - kAhead);
      each_block(slice, [&](const SliceBlock& block) {
        device_.backward(block, sums_of(block, slice), first);
        first = false;
      });
      if (kAhead > 0 && slice + 1 < slices) add_sums(slice + 1);
      send_sums(slice);
      if (kAhead == 0) add_sums(slice);
    }
    if (kAhead > 0) add_sums(0);
    device_.finish_hidden();
  }

 private:
  static std::size_t bytes(std::int64_t count, std::size_t each) {
    return static_cast<std::size_t>(count) * each;
  }
  bool by_columns() const { return features_.gathered_columns > 0; }
  SliceRows own_rows(std::int64_t slice) const {
    return rows_in_slice(slice, slice_rows_, shard_.vocab.rows());
  }
  static std::size_t turn(std::int64_t slice, std::size_t each) {
    return bytes(slice % (Device::kAhead + 1), each);
  }
  std::byte* slice_at(std::int64_t slice) const {
    return buffers_.slice + turn(slice, bytes(shard_.ranks(), parts_.slice.bytes));
  }
  std::byte* whole_at(std::int64_t slice) const {
    return buffers_.whole + turn(slice, parts_.whole.bytes);
  }
  std::byte* sums_at(std::int64_t slice) const {
    return buffers_.sums + turn(slice, bytes(shard_.ranks(), parts_.sums.bytes));
  }
  std::byte* sums_of(const SliceBlock& block, std::int64_t slice) const {
    return by_columns() ? buffers_.full_sums
                        : sums_at(slice) + bytes(block.rank, parts_.sums.bytes);
  }

  void gather(std::int64_t slice) {
    device_.begin_exchange();
    const SliceRows own = own_rows(slice);
    std::byte* const slices = slice_at(slice);
    const std::byte* const mine =
        device_.put_rows(own, slices + bytes(shard_.rank(), parts_.slice.bytes));
    device_.all_gather(mine, slices, parts_.slice.bytes);
    shard_.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
      const std::size_t row = bytes(count, element_);
      device_.copy_rows(whole_at(slice) + bytes(first, element_), bytes(dim_, element_),
                        slices + bytes(rank, parts_.slice.bytes), row, row, own.count,
                        CopyWith::exchanges);
    });
    device_.slice_sent();
  }

  SliceBlock block_of(int rank, std::int64_t slice) const {
    const GatheredVocab::Of& of_rank = shard_.gathered->ranks[static_cast<std::size_t>(rank)];
    const SliceRows rows = rows_in_slice(slice, slice_rows_, of_rank.rows);
    const std::byte* const part = slice_at(slice) + bytes(rank, parts_.slice.bytes);
    return {.rank = rank,
            .of_rank = rows,
            .vocab_begin = of_rank.first + rows.first,
            .vocab_count = rows.count,
            .rows = by_columns() ? whole_at(slice) : part,
            .part = part,
            .vocab_ids = shard_.gathered->tables
                             ? reinterpret_cast<const std::int32_t*>(part + parts_.slice.vocab_ids)
                             : nullptr};
  }

  // Calls function(block) for the ranks that have rows in the slice, in their order, or once for
  // all. Does nothing without tokens.
  template <typename Function>
  void each_block(std::int64_t slice, const Function& function) {
    if (!device_.has_tokens()) return;
    if (const std::optional<SliceBlock> all = device_.block_of_all(slice, slice_at(slice)))
      return function(*all);
    for (int r = 0; r < shard_.ranks(); ++r) {
      const SliceBlock block = block_of(r, slice);
      if (block.vocab_count > 0) function(block);
    }
  }

  // Sends the sums of a slice to the ranks of its rows or columns.
  void send_sums(std::int64_t slice) {
    if (parts_.sums.bytes == 0) return;
    std::byte* const sums = sums_at(slice);
    if (!device_.has_tokens()) {
      device_.clear(sums, bytes(shard_.ranks(), parts_.sums.bytes));
    } else if (by_columns()) {
      split_columns(own_rows(slice).count, sums);
    }
    device_.begin_exchange();
    device_.all_to_all(sums, buffers_.received, parts_.sums.bytes);
    device_.sums_sent();
  }

  // Splits the sums of a weight sharded by columns: each rank's part gets its columns, and all of
  // d_bias.
  void split_columns(std::int64_t rows, std::byte* sums) {
    constexpr std::size_t kElement = sizeof(float);
    if (features_.d_weight) {
      shard_.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
        const std::size_t row = bytes(count, kElement);
        device_.copy_rows(sums + bytes(rank, parts_.sums.bytes), row,
                          buffers_.full_sums + bytes(first, kElement), bytes(dim_, kElement), row,
                          rows, CopyWith::kernels);
      });
    }
    if (!features_.d_bias) return;
    const std::size_t bias = bytes(rows, kElement);
    for (int r = 0; r < shard_.ranks(); ++r) {
      device_.copy_rows(sums + bytes(r, parts_.sums.bytes) + parts_.sums.d_bias, bias,
                        buffers_.full_sums + parts_.full_sums.d_bias, bias, bias, 1,
                        CopyWith::kernels);
    }
  }

  void add_sums(std::int64_t slice) {
    if (parts_.sums.bytes == 0) return;
    device_.wait_for_sums();
    const SliceRows own = own_rows(slice);
    if (own.count > 0) device_.add_sums(own, sums_at(slice));
  }

  Device& device_;
  const ShardOperands& shard_;
  const HeadFeatures& features_;
  const SliceParts& parts_;
  const SliceBuffers buffers_;
  const std::int64_t dim_;
  const std::size_t element_;
  const std::int64_t slice_rows_;
};

}  // namespace logitless

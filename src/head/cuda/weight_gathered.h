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
#pragma once

#include "head/cuda/run.h"

namespace logitless::cuda {

class WeightGathered {
 public:
  explicit WeightGathered(const Run& run) : run_(run), layout_(run.layout.gathered) {}

  void run(const ChunkFunction& set_coefficients);

 private:
  // The rows of one rank in a slice, or of all ranks.
  struct SliceBlock {
    int rank = 0;
    std::int64_t vocab_begin = 0, vocab_count = 0;
    const std::byte* rows = nullptr;  // [rows of the block, D]
    const float* bias = nullptr;
    const std::int32_t* table = nullptr;  // [rows of the block], with rows of all ranks
  };

  void run_slices(const ChunkFunction& set_coefficients);
  void gather_bias() const;
  void gather_slice(std::int64_t slice) const;
  template <typename F>
  void each_block(std::int64_t slice, const F& function) const;
  SliceBlock block_of(int rank, std::int64_t slice) const;
  bool joins_ranks(std::int64_t slice) const;
  SliceBlock joined_block(std::int64_t slice) const;
  void set_block(ForwardCall& chunk, const SliceBlock& block) const;
  void forward_block(const SliceBlock& block, bool first) const;
  void backward_block(const ForwardCall& tokens, const SliceBlock& block, std::byte* sums_of);
  void exchange_sums(std::int64_t rows, std::byte* sums) const;
  void send_sums(std::int64_t slice) const;
  void add_sums(std::int64_t slice) const;
  // Returns the `each` bytes of a slice, or of each rank's part: of the two buffers in turn, if
  // there are several slices.
  std::byte* buffer_of(std::int64_t slice, std::size_t offset, std::size_t each) const;
  std::byte* slice_at(std::int64_t slice) const;
  std::byte* whole_at(std::int64_t slice) const;
  std::byte* sums_at(std::int64_t slice) const;

  const Run& run_;
  const GatheredLayout& layout_;
  bool adds_hidden_ = false;  // d_hidden already has sums of other slices
};

}  // namespace logitless::cuda

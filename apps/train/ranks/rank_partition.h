// Sharding of parameters over the ranks of a training run (ZeRO stage 1: Rajbhandari et al. 2020,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"). Each rank updates an
// equal shard of all parameters. It receives the summed gradients of its shard (reduce-scatter),
// holds the moments, and sends the new values to the others (all-gather). With a
// vocabulary-parallel head, a rank holds rows of the head alone, and these are not exchanged.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "train/optimizer/tensor_set.h"

namespace logitless::train {

// The longest time that a rank waits for the others, one of which may be writing a checkpoint.
inline constexpr std::chrono::milliseconds kRanksLimit = std::chrono::minutes(10);

// The copies of a parameter that programs read, which every rank therefore holds in full.
struct ParameterUse {
  bool master = true;    // f32 values; if false, a rank holds those of its shard only
  bool rounded = false;  // a copy in bf16
  // Elements of a row of a row-sharded matrix: each rank reads and updates its local rows only. At
  // most one tensor has it. 0: not row-sharded.
  std::size_t local_row = 0;
};

// A part of a set of tensors that is exchanged at one time: one slice for each rank.
struct Bucket {
  std::size_t begin = 0;  // offset of rank 0's slice in the set
  std::size_t slice_size = 0;
  std::size_t stride = 0;  // distance of the slices of successive ranks
  std::size_t owned = 0;   // offset of this rank's slice in its shard
  ParameterUse use;
};

// The local rows of the row-sharded tensor (ParameterUse::local_row).
struct LocalRows {
  std::size_t tensor = 0;
  std::int64_t first = 0, count = 0;
  std::int64_t each = 0;  // the count of all ranks but the last ones, which may have fewer or none
};

// The part of one tensor in one bucket that a rank updates.
struct OwnedSlice {
  std::size_t tensor = 0;
  std::size_t begin = 0, count = 0;  // in elements of the tensor
  std::size_t at = 0;                // offset in the set
  std::size_t owned = 0;             // offset in the rank's shard
};

// The layout of a set of tensors and its shards. Offsets and counts are in elements; all offsets
// are multiples of 64.
class RankPartition {
 public:
  static constexpr std::size_t kBucket = std::size_t{1} << 24;

  // `counts`: elements of each tensor. The set orders tensors by use: bf16 copies only, both,
  // masters only, row-sharded. `bucket`: elements of all ranks in a bucket; with one rank there is
  // one bucket for each use.
  RankPartition(const std::vector<std::size_t>& counts, const std::vector<ParameterUse>& uses,
                int rank = 0, int ranks = 1, std::size_t bucket = kBucket);

  // Returns LocalRows::each for `rows` rows of `row` elements.
  static std::int64_t rows_of_each(std::int64_t rows, std::int64_t row, int ranks);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const TensorLayout& layout() const { return layout_; }
  // Buckets of tensors that all ranks read: the units of reduce-scatter and all-gather.
  const std::vector<Bucket>& buckets() const { return buckets_; }
  // Buckets of local_rows().
  const std::vector<Bucket>& local_buckets() const { return local_buckets_; }
  const std::optional<LocalRows>& local_rows() const { return local_rows_; }  // none with one rank
  const std::vector<OwnedSlice>& slices() const { return slices_; }
  std::size_t owned() const { return owned_; }
  // Returns the elements of the longest bucket, those of all ranks.
  std::size_t longest_bucket() const;

  // All ranks read [0, shared_end()) of the set: as bf16 copies in [0, rounded_end()), as masters
  // in [master_begin(), shared_end()). Before master_begin() a rank holds masters of its shard
  // only: owned_before_masters() elements. The local part of a set ends with the rank's rows of the
  // row-sharded tensor, after shared_end(). It has local_end() elements; local_at(at) is the local
  // offset of offset `at`.
  std::size_t shared_end() const { return shared_end_; }
  std::size_t rounded_end() const { return rounded_end_; }
  std::size_t master_begin() const { return master_begin_; }
  std::size_t owned_before_masters() const { return owned_before_masters_; }
  std::size_t local_end() const { return shared_end_ + local_stride_; }
  std::size_t local_at(std::size_t at) const {
    return at < shared_end_ ? at : at - static_cast<std::size_t>(rank_) * local_stride_;
  }
  // Returns the offset in the set of the first local element of a tensor.
  std::size_t local_begin(std::size_t tensor) const {
    const bool own = local_rows_ && local_rows_->tensor == tensor;
    return layout_.offsets[tensor] + (own ? static_cast<std::size_t>(rank_) * local_stride_ : 0);
  }
  // Layout of bf16 copies: rounded() elements, the local rows last.
  std::size_t rounded() const { return rounded_end_ + (local_rounded_ ? local_stride_ : 0); }
  bool is_rounded(std::size_t at) const {
    return at < rounded_end_ || (local_rounded_ && at >= shared_end_);
  }
  std::size_t rounded_at(std::size_t at) const {
    return at < rounded_end_ ? at : rounded_end_ + local_at(at) - shared_end_;
  }
  // Layout of masters: first those of this rank's shard, then complete tensors, then local rows.
  std::size_t masters() const { return owned_before_masters_ + local_end() - master_begin_; }
  std::size_t master_of(const OwnedSlice& slice) const {
    return slice.at < master_begin_ ? slice.owned : master_at(slice.at);
  }
  // `at` is an offset in the set, in a complete tensor or in a local row.
  std::size_t master_at(std::size_t at) const {
    return owned_before_masters_ + local_at(at) - master_begin_;
  }

 private:
  int rank_, ranks_;
  TensorLayout layout_;
  std::vector<Bucket> buckets_, local_buckets_;
  std::optional<LocalRows> local_rows_;
  std::vector<OwnedSlice> slices_;
  std::size_t owned_ = 0;
  std::size_t rounded_end_ = 0, master_begin_ = 0, owned_before_masters_ = 0;
  std::size_t shared_end_ = 0, local_stride_ = 0;
  bool local_rounded_ = false;

  void add_local_rows(std::size_t tensor, const ParameterUse& use, std::size_t most);
  void add_slices(const std::vector<Bucket>& buckets);
};

}  // namespace logitless::train

// What each of several ranks of a training run updates (ZeRO stage 1: Rajbhandari et al. 2020,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"): equal pieces of all
// parameters. A rank adds up the gradients of its pieces over all ranks, has their moments, and
// sends their new values to the others. Of a head whose words are over ranks it has its rows, and
// nothing is added up or sent.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "train/tensor_set.h"

namespace logitless::train {

// How long a rank waits for the others: one of them may be writing a checkpoint.
inline constexpr std::chrono::milliseconds kRanksLimit = std::chrono::minutes(10);

// What programs read of a parameter, and so what every rank needs whole.
struct ParameterUse {
  bool master = true;    // its f32 values; otherwise a rank has those of its pieces alone
  bool rounded = false;  // their copy in bf16
  // Elements of a row of a matrix of which each rank reads, and updates, rows of its own: one
  // tensor at most. 0: ranks read all of it.
  std::size_t own_row = 0;
};

// A stretch of a set of tensors that is exchanged at once: a piece of each rank.
struct Bucket {
  std::size_t begin = 0;  // of the first rank's, in the set
  std::size_t piece = 0;
  std::size_t stride = 0;  // from a rank's piece to the next one's
  std::size_t owned = 0;   // where this rank's piece lies among those that it owns
  ParameterUse use;
};

// The rows that a rank has of ParameterUse::own_row's tensor.
struct OwnRows {
  std::size_t tensor = 0;
  std::int64_t first = 0, count = 0;
  std::int64_t each = 0;  // count of all ranks but the last ones, which have fewer or none
};

// What a rank owns of one tensor in one bucket.
struct OwnedSlice {
  std::size_t tensor = 0;
  std::size_t begin = 0, count = 0;  // elements of the tensor
  std::size_t at = 0;                // of the set
  std::size_t owned = 0;             // among those that the rank owns
};

// Offsets and counts are in elements; all begin at multiples of 64.
class RankPieces {
 public:
  static constexpr std::size_t kBucket = std::size_t{1} << 24;

  // Of tensors with these numbers of elements. The set has them in order of their uses: those that
  // are only rounded, those that are both, those that are masters alone, the one with rows of each
  // rank. `bucket`: elements of all ranks; of one rank the bucket is as long as it may be.
  RankPieces(const std::vector<std::size_t>& counts, const std::vector<ParameterUse>& uses,
             int rank = 0, int ranks = 1, std::size_t bucket = kBucket);

  // OwnRows::each of `rows` with `row` elements.
  static std::int64_t rows_of_each(std::int64_t rows, std::int64_t row, int ranks);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const TensorLayout& layout() const { return layout_; }
  // Of what all ranks read; gradients are added up and values sent by these.
  const std::vector<Bucket>& buckets() const { return buckets_; }
  // Of own_rows().
  const std::vector<Bucket>& own_buckets() const { return own_buckets_; }
  const std::optional<OwnRows>& own_rows() const { return own_rows_; }  // none of one rank
  const std::vector<OwnedSlice>& slices() const { return slices_; }
  std::size_t owned() const { return owned_; }
  // Of a bucket of all ranks, at most.
  std::size_t longest_bucket() const;

  // All ranks read [0, shared_end()) of the set: copies in bf16 of [0, rounded_end()), masters of
  // [master_begin(), shared_end()), and of those before it masters are owned_before_masters()
  // elements. What is kept here of a set has this rank's own rows after shared_end(): in all
  // here_end() elements, that of the set at `at` in here(at).
  std::size_t shared_end() const { return shared_end_; }
  std::size_t rounded_end() const { return rounded_end_; }
  std::size_t master_begin() const { return master_begin_; }
  std::size_t owned_before_masters() const { return owned_before_masters_; }
  std::size_t here_end() const { return shared_end_ + own_stride_; }
  std::size_t here(std::size_t at) const {
    return at < shared_end_ ? at : at - static_cast<std::size_t>(rank_) * own_stride_;
  }
  // Of the set, the first element of a tensor that is here.
  std::size_t first_here(std::size_t tensor) const {
    const bool own = own_rows_ && own_rows_->tensor == tensor;
    return layout_.offsets[tensor] + (own ? static_cast<std::size_t>(rank_) * own_stride_ : 0);
  }
  // Where copies in bf16 lie: rounded() elements, the own rows last.
  std::size_t rounded() const { return rounded_end_ + (own_rounded_ ? own_stride_ : 0); }
  bool is_rounded(std::size_t at) const {
    return at < rounded_end_ || (own_rounded_ && at >= shared_end_);
  }
  std::size_t rounded_at(std::size_t at) const {
    return at < rounded_end_ ? at : rounded_end_ + here(at) - shared_end_;
  }
  // Where masters lie that are kept so: the owned ones first, then the whole ones, then own rows.
  std::size_t masters() const { return owned_before_masters_ + here_end() - master_begin_; }
  std::size_t master_of(const OwnedSlice& slice) const {
    return slice.at < master_begin_ ? slice.owned : master_at(slice.at);
  }
  // `at`, of the set, is in a whole one, or in a row that is here.
  std::size_t master_at(std::size_t at) const {
    return owned_before_masters_ + here(at) - master_begin_;
  }

 private:
  int rank_, ranks_;
  TensorLayout layout_;
  std::vector<Bucket> buckets_, own_buckets_;
  std::optional<OwnRows> own_rows_;
  std::vector<OwnedSlice> slices_;
  std::size_t owned_ = 0;
  std::size_t rounded_end_ = 0, master_begin_ = 0, owned_before_masters_ = 0;
  std::size_t shared_end_ = 0, own_stride_ = 0;
  bool own_rounded_ = false;

  void add_own_rows(std::size_t tensor, const ParameterUse& use, std::size_t most);
  void add_slices(const std::vector<Bucket>& buckets);
};

}  // namespace logitless::train

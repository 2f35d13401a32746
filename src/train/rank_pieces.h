// What each of several ranks of a training run updates (ZeRO stage 1: Rajbhandari et al. 2020,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"): equal pieces of all
// parameters. A rank adds up the gradients of its pieces over all ranks, has their moments, and
// sends their new values to the others.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "train/tensor_set.h"

namespace logitless::train {

// How long a rank waits for the others: one of them may be writing a checkpoint.
inline constexpr std::chrono::milliseconds kRanksLimit = std::chrono::minutes(10);

// What programs read of a parameter, and so what every rank needs whole.
struct ParameterUse {
  bool master = true;    // its f32 values; otherwise a rank has those of its pieces alone
  bool rounded = false;  // their copy in bf16
};

// A stretch of a set of tensors that is exchanged at once: [ranks, piece] elements.
struct Bucket {
  std::size_t begin = 0;  // in the set
  std::size_t piece = 0;
  std::size_t owned = 0;  // where this rank's piece lies among those that it owns
  ParameterUse use;
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
  // are only rounded, those that are both, those that are masters alone. `bucket`: elements of all
  // ranks; of one rank the bucket is as long as it may be.
  RankPieces(const std::vector<std::size_t>& counts, const std::vector<ParameterUse>& uses,
             int rank = 0, int ranks = 1, std::size_t bucket = kBucket);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const TensorLayout& layout() const { return layout_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const std::vector<OwnedSlice>& slices() const { return slices_; }
  std::size_t owned() const { return owned_; }
  // Of a bucket of all ranks, at most.
  std::size_t longest_bucket() const;

  // Copies in bf16 are of [0, rounded_end()); masters are whole in [master_begin(), layout().end),
  // and of those before, masters are owned_before_masters() elements.
  std::size_t rounded_end() const { return rounded_end_; }
  std::size_t master_begin() const { return master_begin_; }
  std::size_t owned_before_masters() const { return owned_before_masters_; }
  // Where masters lie that are kept so: the owned ones first, then the whole ones.
  std::size_t masters() const { return owned_before_masters_ + layout_.end - master_begin_; }
  std::size_t master_of(const OwnedSlice& slice) const {
    return slice.at < master_begin_ ? slice.owned : master_at(slice.at);
  }
  // `at`, of the set, is in a whole one.
  std::size_t master_at(std::size_t at) const { return owned_before_masters_ + at - master_begin_; }

 private:
  int rank_, ranks_;
  TensorLayout layout_;
  std::vector<Bucket> buckets_;
  std::vector<OwnedSlice> slices_;
  std::size_t owned_ = 0;
  std::size_t rounded_end_ = 0, master_begin_ = 0, owned_before_masters_ = 0;
};

}  // namespace logitless::train

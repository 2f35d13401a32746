// Tracks which gradient buckets are complete while the last micro-batch of a step still runs, so
// that their reduce-scatter can overlap it.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "train/ranks/rank_partition.h"

namespace logitless::train {

class GradientBuckets {
 public:
  explicit GradientBuckets(const RankPartition& partition);

  // Marks the begin of a last micro-batch.
  void begin();
  // Marks the gradient of tensor `tensor` of the set as complete. Calls whole(bucket) for each
  // bucket that it completes.
  void done(std::size_t tensor, const std::function<void(std::size_t)>& whole);
  // Returns all buckets, in the order of their completion since begin().
  std::vector<std::size_t> found() const;

 private:
  std::vector<std::vector<std::size_t>> buckets_of_;  // tensor -> buckets
  std::vector<std::size_t> tensors_in_;               // bucket -> number of tensors
  std::vector<std::size_t> missing_;  // tensors whose gradients are missing, by bucket
  std::vector<std::size_t> found_;
};

}  // namespace logitless::train

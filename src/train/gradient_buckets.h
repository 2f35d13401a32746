// Which buckets' gradients are whole while a step's last micro-batch still runs, so that ranks can
// add them up meanwhile.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "train/rank_pieces.h"

namespace logitless::train {

class GradientBuckets {
 public:
  explicit GradientBuckets(const RankPieces& pieces);

  // A last micro-batch begins.
  void begin();
  // The gradient of tensor `tensor` of the set is made. Calls whole(bucket) for each bucket that is
  // whole with it.
  void done(std::size_t tensor, const std::function<void(std::size_t)>& whole);
  // All buckets, in the order in which they have become whole since begin().
  std::vector<std::size_t> found() const;

 private:
  std::vector<std::vector<std::size_t>> buckets_of_;  // by tensor
  std::vector<std::size_t> tensors_in_;               // by bucket
  std::vector<std::size_t> missing_;                  // of these
  std::vector<std::size_t> found_;
};

}  // namespace logitless::train

#include "train/ranks/gradient_buckets.h"

#include <algorithm>

namespace logitless::train {

GradientBuckets::GradientBuckets(const RankPartition& partition)
    : buckets_of_(partition.layout().counts.size()), tensors_in_(partition.buckets().size()) {
  const TensorLayout& layout = partition.layout();
  for (std::size_t b = 0; b < partition.buckets().size(); ++b) {
    const Bucket& bucket = partition.buckets()[b];
    const std::size_t end =
        bucket.begin + static_cast<std::size_t>(partition.ranks()) * bucket.slice_size;
    for (std::size_t t = 0; t < layout.counts.size(); ++t) {
      const std::size_t first = layout.offsets[t], last = first + layout.counts[t];
      if (first >= end || last <= bucket.begin) continue;
      buckets_of_[t].push_back(b);
      ++tensors_in_[b];
    }
  }
  begin();
}

void GradientBuckets::begin() {
  missing_ = tensors_in_;
  found_.clear();
}

void GradientBuckets::done(std::size_t tensor, const std::function<void(std::size_t)>& whole) {
  for (const std::size_t bucket : buckets_of_[tensor]) {
    if (--missing_[bucket] > 0) continue;
    whole(bucket);
    found_.push_back(bucket);
  }
}

std::vector<std::size_t> GradientBuckets::found() const {
  std::vector<std::size_t> all = found_;
  for (std::size_t b = 0; b < tensors_in_.size(); ++b)
    if (std::find(found_.begin(), found_.end(), b) == found_.end()) all.push_back(b);
  return all;
}

}  // namespace logitless::train

#include "train/ranks/host_exchange.h"

#include <algorithm>
#include <vector>

#include "logitless/parallel.h"

namespace logitless::train {

HostExchange::HostExchange(const RankPartition& partition, Communicator* ranks)
    : partition_(partition), ranks_(partition.ranks() > 1 ? ranks : nullptr) {}

void HostExchange::add_gradients(const TensorSet& gradients, int threads) {
  if (ranks_ == nullptr) return;
  constexpr std::int64_t kGrain = 16384;
  if (received_.bytes() == 0) received_ = Buffer(partition_.longest_bucket() * sizeof(float));
  const auto mine = static_cast<std::size_t>(partition_.rank());
  for (const Bucket& b : partition_.buckets()) {
    float* const bucket = gradients.all().data() + b.begin;
    ranks_->all_to_all(bucket, received_.data(), b.slice_size * sizeof(float), nullptr);
    const auto* const first = received_.as<const float>();
    float* const own = bucket + mine * b.slice_size;
    parallel_ranges(threads, static_cast<std::int64_t>(b.slice_size), kGrain,
                    [&](std::int64_t begin, std::int64_t end) {
                      std::copy(first + begin, first + end, own + begin);
                      const float* slice = first + b.slice_size;
                      for (int r = 1; r < partition_.ranks(); ++r, slice += b.slice_size) {
                        for (std::int64_t i = begin; i < end; ++i) own[i] += slice[i];
                      }
                    });
  }
}

void HostExchange::share(const TensorSet& set) const {
  if (ranks_ == nullptr) return;
  const auto mine = static_cast<std::size_t>(partition_.rank());
  for (const Bucket& b : partition_.buckets()) {
    float* const bucket = set.all().data() + b.begin;
    ranks_->all_gather(bucket + mine * b.slice_size, bucket, b.slice_size * sizeof(float), nullptr);
  }
}

void HostExchange::share_local_rows(const TensorSet& set) const {
  if (ranks_ == nullptr) return;
  const Buffer received(
      partition_.local_buckets().empty() ? 0 : partition_.longest_bucket() * sizeof(float));
  const auto mine = static_cast<std::size_t>(partition_.rank());
  for (const Bucket& b : partition_.local_buckets()) {
    float* const first = set.all().data() + b.begin;
    auto* const slices = received.as<float>();
    ranks_->all_gather(first + mine * b.stride, slices, b.slice_size * sizeof(float), nullptr);
    for (std::size_t r = 0; r < static_cast<std::size_t>(partition_.ranks()); ++r)
      std::copy_n(slices + r * b.slice_size, b.slice_size, first + r * b.stride);
  }
}

RankTotals HostExchange::sum(const RankTotals& mine) const {
  if (ranks_ == nullptr) return mine;
  std::vector<RankTotals> all(static_cast<std::size_t>(partition_.ranks()));
  ranks_->all_gather_host(&mine, all.data(), sizeof(mine));
  RankTotals sum = all.front();
  for (std::size_t r = 1; r < all.size(); ++r) {
    sum.loss += all[r].loss;
    sum.squares += all[r].squares;
    sum.count += all[r].count;
    sum.note = std::max(sum.note, all[r].note);
  }
  return sum;
}

}  // namespace logitless::train

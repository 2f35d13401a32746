#include "train/host_exchange.h"

#include <algorithm>
#include <vector>

#include "logitless/parallel.h"

namespace logitless::train {

HostExchange::HostExchange(const RankPartition& partitions, Communicator* ranks)
    : slices_(partitions), ranks_(partitions.ranks() > 1 ? ranks : nullptr) {}

void HostExchange::add_gradients(const TensorSet& gradients, int threads) {
  if (ranks_ == nullptr) return;
  constexpr std::int64_t kGrain = 16384;
  if (received_.bytes() == 0) received_ = Buffer(slices_.longest_bucket() * sizeof(float));
  const auto mine = static_cast<std::size_t>(slices_.rank());
  for (const Bucket& b : slices_.buckets()) {
    float* const bucket = gradients.all().data() + b.begin;
    ranks_->all_to_all(bucket, received_.data(), b.partition * sizeof(float), nullptr);
    const auto* const first = received_.as<const float>();
    float* const own = bucket + mine * b.partition;
    parallel_ranges(threads, static_cast<std::int64_t>(b.partition), kGrain,
                    [&](std::int64_t begin, std::int64_t end) {
                      std::copy(first + begin, first + end, own + begin);
                      const float* partition = first + b.partition;
                      for (int r = 1; r < slices_.ranks(); ++r, partition += b.partition) {
                        for (std::int64_t i = begin; i < end; ++i) own[i] += partition[i];
                      }
                    });
  }
}

void HostExchange::share(const TensorSet& set) const {
  if (ranks_ == nullptr) return;
  const auto mine = static_cast<std::size_t>(slices_.rank());
  for (const Bucket& b : slices_.buckets()) {
    float* const bucket = set.all().data() + b.begin;
    ranks_->all_gather(bucket + mine * b.partition, bucket, b.partition * sizeof(float), nullptr);
  }
}

void HostExchange::share_local_rows(const TensorSet& set) const {
  if (ranks_ == nullptr) return;
  const Buffer received(slices_.local_buckets().empty() ? 0
                                                        : slices_.longest_bucket() * sizeof(float));
  const auto mine = static_cast<std::size_t>(slices_.rank());
  for (const Bucket& b : slices_.local_buckets()) {
    float* const first = set.all().data() + b.begin;
    auto* const partitions = received.as<float>();
    ranks_->all_gather(first + mine * b.stride, partitions, b.partition * sizeof(float), nullptr);
    for (std::size_t r = 0; r < static_cast<std::size_t>(slices_.ranks()); ++r)
      std::copy_n(partitions + r * b.partition, b.partition, first + r * b.stride);
  }
}

RankTotals HostExchange::sum(const RankTotals& mine) const {
  if (ranks_ == nullptr) return mine;
  std::vector<RankTotals> all(static_cast<std::size_t>(slices_.ranks()));
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

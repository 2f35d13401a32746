#include "train/host_exchange.h"

#include <algorithm>
#include <vector>

#include "logitless/parallel.h"

namespace logitless::train {

HostExchange::HostExchange(const RankPieces& pieces, Communicator* ranks)
    : pieces_(pieces), ranks_(pieces.ranks() > 1 ? ranks : nullptr) {}

void HostExchange::add_gradients(const TensorSet& gradients, int threads) {
  if (ranks_ == nullptr) return;
  constexpr std::int64_t kGrain = 16384;
  if (received_.bytes() == 0) received_ = Buffer(pieces_.longest_bucket() * sizeof(float));
  const auto mine = static_cast<std::size_t>(pieces_.rank());
  for (const Bucket& b : pieces_.buckets()) {
    float* const bucket = gradients.all().data() + b.begin;
    ranks_->all_to_all(bucket, received_.data(), b.piece * sizeof(float), nullptr);
    const auto* const first = received_.as<const float>();
    float* const own = bucket + mine * b.piece;
    parallel_ranges(threads, static_cast<std::int64_t>(b.piece), kGrain,
                    [&](std::int64_t begin, std::int64_t end) {
                      std::copy(first + begin, first + end, own + begin);
                      const float* piece = first + b.piece;
                      for (int r = 1; r < pieces_.ranks(); ++r, piece += b.piece) {
                        for (std::int64_t i = begin; i < end; ++i) own[i] += piece[i];
                      }
                    });
  }
}

void HostExchange::share(const TensorSet& set) const {
  if (ranks_ == nullptr) return;
  const auto mine = static_cast<std::size_t>(pieces_.rank());
  for (const Bucket& b : pieces_.buckets()) {
    float* const bucket = set.all().data() + b.begin;
    ranks_->all_gather(bucket + mine * b.piece, bucket, b.piece * sizeof(float), nullptr);
  }
}

void HostExchange::share_own_rows(const TensorSet& set) const {
  if (ranks_ == nullptr) return;
  const Buffer received(pieces_.own_buckets().empty() ? 0
                                                      : pieces_.longest_bucket() * sizeof(float));
  const auto mine = static_cast<std::size_t>(pieces_.rank());
  for (const Bucket& b : pieces_.own_buckets()) {
    float* const first = set.all().data() + b.begin;
    auto* const pieces = received.as<float>();
    ranks_->all_gather(first + mine * b.stride, pieces, b.piece * sizeof(float), nullptr);
    for (std::size_t r = 0; r < static_cast<std::size_t>(pieces_.ranks()); ++r)
      std::copy_n(pieces + r * b.piece, b.piece, first + r * b.stride);
  }
}

RankTotals HostExchange::sum(const RankTotals& mine) const {
  if (ranks_ == nullptr) return mine;
  std::vector<RankTotals> all(static_cast<std::size_t>(pieces_.ranks()));
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

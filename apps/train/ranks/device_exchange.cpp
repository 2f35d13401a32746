#include "train/ranks/device_exchange.h"

#include <chrono>
#include <thread>

namespace logitless::train {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t bucket_bytes(const RankPartition& partition) {
  const std::size_t bytes = partition.longest_bucket() * sizeof(float);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns the address of an element of the bf16 copies.
std::byte* rounded_at(void* rounded, std::size_t element) {
  return static_cast<std::byte*>(rounded) + 2 * element;
}

}  // namespace

std::size_t DeviceExchange::bytes(const RankPartition& partition) {
  if (partition.ranks() == 1) return 0;
  return bucket_bytes(partition) +
         (static_cast<std::size_t>(partition.ranks()) + 1) * sizeof(DeviceAdamWTotals);
}

DeviceExchange::DeviceExchange(const Context& context, const DeviceStream& stream,
                               const RankPartition& partition, Communicator* ranks)
    : stream_(stream), partition_(partition), ranks_(partition.ranks() > 1 ? ranks : nullptr) {
  if (alone()) return;
  lane_ = std::make_unique<Lane>(Lane{DeviceStream(context, true), DeviceEvent(context)});
  totals_ = bucket_bytes(partition);
  memory_ = DeviceBuffer(context, bytes(partition));
}

std::vector<std::size_t> DeviceExchange::of_first(const std::vector<std::size_t>& mine) const {
  if (alone()) return mine;
  std::vector<std::size_t> all(mine.size() * static_cast<std::size_t>(partition_.ranks()));
  ranks_->all_gather_host(mine.data(), all.data(), mine.size() * sizeof(std::size_t));
  all.resize(mine.size());
  return all;
}

void DeviceExchange::add_gradients(float* gradients, std::span<const std::size_t> order,
                                   std::span<const DeviceEvent> whole) const {
  if (alone()) return;
  const auto mine = static_cast<std::size_t>(partition_.rank());
  const DeviceStream& lane = lane_->stream;
  for (const std::size_t number : order) {
    const Bucket& b = partition_.buckets()[number];
    lane.follow(whole[number]);
    ranks_->all_to_all(gradients + b.begin, memory_.data(), b.slice_size * sizeof(float),
                       lane.handle());
    lane.add_slices(memory_.as<float>(), partition_.ranks(),
                    static_cast<std::int64_t>(b.slice_size),
                    gradients + b.begin + mine * b.slice_size);
  }
  lane.record(lane_->added);
  stream_.follow(lane_->added);
}

void DeviceExchange::share_totals() const {
  if (alone()) return;
  ranks_->all_gather(local_totals(), local_totals() + 1, sizeof(DeviceAdamWTotals),
                     stream_.handle());
}

void DeviceExchange::share_values(float* masters, void* rounded) const {
  if (alone()) return;
  const auto mine = static_cast<std::size_t>(partition_.rank());
  for (const Bucket& b : partition_.buckets()) {
    const std::size_t own = b.begin + mine * b.slice_size;
    if (b.use.rounded)
      ranks_->all_gather(rounded_at(rounded, own), rounded_at(rounded, b.begin), 2 * b.slice_size,
                         stream_.handle());
    if (b.use.master)
      ranks_->all_gather(masters + partition_.master_at(own),
                         masters + partition_.master_at(b.begin), b.slice_size * sizeof(float),
                         stream_.handle());
  }
}

void DeviceExchange::gather(const Bucket& bucket, const float* owned, std::span<float> to) const {
  const std::size_t bytes = bucket.slice_size * sizeof(float);
  const float* all = owned;
  if (!alone()) {
    ranks_->all_gather(owned, memory_.data(), bytes, stream_.handle());
    all = memory_.as<float>();
  }
  if (to.empty()) return;
  for (std::size_t r = 0; r < static_cast<std::size_t>(partition_.ranks()); ++r)
    stream_.copy(to.data() + bucket.begin + r * bucket.stride, all + r * bucket.slice_size, bytes);
}

void DeviceExchange::gather(const float* owned, std::span<float> to) const {
  for (const auto* buckets : {&partition_.buckets(), &partition_.local_buckets()})
    for (const Bucket& b : *buckets) gather(b, owned + b.owned, to);
  if (!alone()) ranks_->wait(stream_.handle(), kRanksLimit);
  stream_.wait();
}

void DeviceExchange::gather_masters(const float* masters, std::span<float> to) const {
  for (const Bucket& b : partition_.buckets()) {
    if (!b.use.master) gather(b, masters + b.owned, to);
  }
  const auto mine = static_cast<std::size_t>(partition_.rank());
  for (const Bucket& b : partition_.local_buckets())
    gather(b, masters + partition_.master_at(b.begin + mine * b.stride), to);
  if (!to.empty()) {
    const std::span<float> whole =
        to.subspan(partition_.master_begin(), partition_.shared_end() - partition_.master_begin());
    stream_.copy(whole.data(), masters + partition_.owned_before_masters(), whole.size_bytes());
  }
  if (!alone()) ranks_->wait(stream_.handle(), kRanksLimit);
  stream_.wait();
}

void DeviceExchange::meet() const {
  stream_.wait();
  if (alone()) return;
  const std::byte mine{};
  std::vector<std::byte> all(static_cast<std::size_t>(partition_.ranks()));
  ranks_->all_gather_host(&mine, all.data(), 1);
}

void DeviceExchange::wait(const DeviceEvent& event) const {
  if (alone()) return event.wait();
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  while (!event.passed()) {
    ranks_->check();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (Clock::now() - start > kRanksLimit)
      ranks_->wait(stream_.handle(), std::chrono::milliseconds(1));
  }
  ranks_->check();  // events also pass when a failed group ends its calls
}

}  // namespace logitless::train

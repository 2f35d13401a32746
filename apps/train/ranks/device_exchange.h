// The exchanges between ranks in a training step on GPUs: reduce-scatter of gradients, all-gather
// of values.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/device.h"
#include "logitless/device_adamw.h"
#include "train/ranks/rank_partition.h"

namespace logitless::train {

// All calls are enqueued on the stream, except gather(), which waits. With one rank nothing is
// exchanged.
class DeviceExchange {
 public:
  // Returns the bytes of device memory it takes, without the communicator's buffers.
  static std::size_t bytes(const RankPartition& partition);

  // `ranks`: null for one rank. All three references must outlive this.
  DeviceExchange(const Context& context, const DeviceStream& stream, const RankPartition& partition,
                 Communicator* ranks);

  bool alone() const { return ranks_ == nullptr; }
  // Broadcasts the numbers of rank 0; all ranks pass equally many. Collective, between the hosts.
  std::vector<std::size_t> of_first(const std::vector<std::size_t>& mine) const;
  // Reduce-scatter: the local shards of `gradients` (RankPartition::local_end() elements) become
  // sums over ranks, added in the order of ranks. Other shards keep their values. Buckets are
  // exchanged in `order`, which is the same on all ranks, each after its event whole[bucket]. The
  // exchanges run on a communication stream, so that they overlap the computation of later buckets.
  // Work enqueued afterwards on the main stream waits for all of them.
  void add_gradients(float* gradients, std::span<const std::size_t> order,
                     std::span<const DeviceEvent> whole) const;
  // The totals of this rank, and those of all ranks, [ranks], after share_totals().
  DeviceAdamWTotals* local_totals() const { return memory_.as<DeviceAdamWTotals>(totals_); }
  const DeviceAdamWTotals* all_totals() const { return local_totals() + 1; }
  void share_totals() const;
  // All-gather: each rank's shards of `masters` and `rounded` (laid out as in RankPartition) go to
  // all ranks that read the whole tensor.
  void share_values(float* masters, void* rounded) const;
  // Gathers the shards `owned` of all ranks into the host set `to`. Collective, though `to` may be
  // empty.
  void gather(const float* owned, std::span<float> to) const;
  // Does the same for master weights.
  void gather_masters(const float* masters, std::span<float> to) const;

  // Barrier: waits until this rank's stream is done and all ranks have called it.
  void meet() const;

  // Waits for the event. Throws DeviceError when the group has failed. When the limit is exceeded
  // it names the missing ranks.
  void wait(const DeviceEvent& event) const;

 private:
  void gather(const Bucket& bucket, const float* owned, std::span<float> to) const;

  const DeviceStream& stream_;
  const RankPartition& partition_;
  Communicator* const ranks_;
  struct Lane {
    DeviceStream stream;
    DeviceEvent added;
  };
  std::unique_ptr<Lane> lane_;  // null with one rank
  std::size_t totals_ = 0;      // offset in bytes
  DeviceBuffer memory_;         // receive buffer of a bucket, then totals
};

}  // namespace logitless::train

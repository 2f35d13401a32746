// Where ranks meet in a step on GPUs: gradients are added up, values sent to all.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/device.h"
#include "logitless/device_adamw.h"
#include "train/rank_pieces.h"

namespace logitless::train {

// Everything is enqueued on the stream but for gather(), which waits. One rank exchanges nothing.
class DeviceExchange {
 public:
  // Of the device's memory, beside the communicator's own.
  static std::size_t bytes(const RankPieces& pieces);

  // `ranks`: null of one rank; all three outlive this.
  DeviceExchange(const Context& context, const DeviceStream& stream, const RankPieces& pieces,
                 Communicator* ranks);

  bool alone() const { return ranks_ == nullptr; }
  // What the first rank gives, as many numbers as the others. Collective, between the hosts.
  std::vector<std::size_t> of_first(const std::vector<std::size_t>& mine) const;
  // gradients: RankPieces::here_end() elements. Of this rank's pieces they become the sums over
  // ranks, in their order; what others hold of them is left as it is. Buckets go in `order`, the
  // same on all ranks, each after whole[bucket], on a stream of their own, beside what makes the
  // others; what is enqueued afterwards comes after all.
  void add_gradients(float* gradients, std::span<const std::size_t> order,
                     std::span<const DeviceEvent> whole) const;
  // Where this rank's totals go, and those of all, [ranks], after share_totals().
  DeviceAdamWTotals* own_totals() const { return memory_.as<DeviceAdamWTotals>(totals_); }
  const DeviceAdamWTotals* all_totals() const { return own_totals() + 1; }
  void share_totals() const;
  // masters, rounded: as RankPieces has them. Each rank's pieces go to all that
  // need them whole.
  void share_values(float* masters, void* rounded) const;
  // A whole set, of which this rank has `owned`, to the host; `to` may be empty on some ranks, but
  // all call.
  void gather(const float* owned, std::span<float> to) const;
  // The same of masters.
  void gather_masters(const float* masters, std::span<float> to) const;

  // Waits until all ranks are here and this one's stream is done.
  void meet() const;

  // Waits for the event as long as the group has not failed; throws DeviceError when it has, or
  // naming the ranks that are missing when the event takes longer than the limit.
  void wait(const DeviceEvent& event) const;

 private:
  void gather(const Bucket& bucket, const float* owned, std::span<float> to) const;

  const DeviceStream& stream_;
  const RankPieces& pieces_;
  Communicator* const ranks_;
  struct Lane {
    DeviceStream stream;
    DeviceEvent added;
  };
  std::unique_ptr<Lane> lane_;  // of several ranks
  std::size_t totals_ = 0;      // in bytes
  DeviceBuffer memory_;         // the pieces of a bucket, then totals
};

}  // namespace logitless::train

// The exchanges between ranks in a training step on CPUs, and the host's sums on any device.
#pragma once

#include <cstdint>

#include "logitless/communicator.h"
#include "logitless/memory.h"
#include "train/ranks/rank_partition.h"

namespace logitless::train {

// A rank's contribution to a step, or to a validation.
struct RankTotals {
  double loss = 0.0;
  double squares = 0.0;  // of the gradients of its shards
  double count = 0.0;    // number of targets
  std::int64_t note = 0;
};

// All calls are collective; with one rank nothing is exchanged. They throw the communicator's
// exceptions.
class HostExchange {
 public:
  // `ranks`: null for one rank. Both must outlive this.
  HostExchange(const RankPartition& partition, Communicator* ranks);

  // Reduce-scatter: this rank's shards of the gradients become sums over ranks, added in the order
  // of ranks. Other shards keep their values.
  void add_gradients(const TensorSet& gradients, int threads);
  // All-gather: each rank's shards of the set go to all ranks, except the rows of a sharded head.
  void share(const TensorSet& set) const;
  // All-gathers those rows, for checkpoints and exports.
  void share_local_rows(const TensorSet& set) const;
  // Returns the sums over ranks, added in their order, and the greatest note.
  RankTotals sum(const RankTotals& mine) const;

 private:
  const RankPartition& partition_;
  Communicator* const ranks_;
  Buffer received_;  // receive buffer of a bucket
};

}  // namespace logitless::train

// Where ranks meet in a step on the CPU, and what their hosts add up wherever they train.
#pragma once

#include <cstdint>

#include "logitless/communicator.h"
#include "logitless/memory.h"
#include "train/rank_pieces.h"

namespace logitless::train {

// What a rank adds to a step, or to a validation.
struct RankTotals {
  double loss = 0.0;
  double squares = 0.0;  // of the gradients of its pieces
  double count = 0.0;    // of targets
  std::int64_t note = 0;
};

// Calls are collective. One rank exchanges nothing. Throws what the communicator throws.
class HostExchange {
 public:
  // `ranks`: null of one rank; both outlive this.
  HostExchange(const RankPieces& pieces, Communicator* ranks);

  // Of this rank's pieces the gradients become the sums over ranks, in their order; what others
  // hold of them is left as it is.
  void add_gradients(const TensorSet& gradients, int threads);
  // Each rank's pieces of the set go to all, but for rows that ranks have for themselves.
  void share(const TensorSet& set) const;
  // Those, for the host.
  void share_own_rows(const TensorSet& set) const;
  // Sums over ranks in their order, and the greatest note.
  RankTotals sum(const RankTotals& mine) const;

 private:
  const RankPieces& pieces_;
  Communicator* const ranks_;
  Buffer received_;  // the pieces of a bucket
};

}  // namespace logitless::train

// Far-field problems with a vocabulary sharded over ranks.
#pragma once

#include <vector>

#include "head/sharding/sharded.h"
#include "support/far_cases.h"

namespace logitless::test {

// Returns options of which the first changes nothing; far_both_options has those of far_both.
std::vector<FarOption> far_backward_options();
std::vector<FarOption> far_both_options();

struct FarSplit {
  VocabSplit vocab;
  std::vector<VocabOrder> orders;  // of each rank's rows, not shared yet
  // The same tiles in one order, concatenated by rank, with which a single rank gets the same
  // tiles. Not for splits within tiles.
  VocabOrder whole;
};

// Distributes the full tiles of an order one by one; the last, possibly short, goes to the last
// rank.
FarSplit interleave_tiles(const VocabOrder& order, int ranks);
// Gives each rank these entries in their relative order, so that the tiles differ.
FarSplit split_order(const VocabOrder& order, const VocabSplit& vocab_shards);

// Runs a far-field call on all ranks, with `run` as for call_far.
FarResult call_sharded_far(const FarProblem& problem, const FarSplit& split, RunSpec run,
                           const TokenSplit& tokens = {}, unsigned delays = 0,
                           std::atomic<std::int64_t>* sent = nullptr);

}  // namespace logitless::test

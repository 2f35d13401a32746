// Far-field problems whose words are spread over ranks.
#pragma once

#include <vector>

#include "head/sharded.h"
#include "support/far_problem.h"

namespace logitless::test {

// What changes the gradient, one by one; the first is nothing. Of plans that far_both takes, too.
struct FarOption {
  const char* name;
  void (*change)(HeadSpec&);
};
std::vector<FarOption> far_backward_options();
std::vector<FarOption> far_both_options();

struct FarSplit {
  WordSplit words;
  std::vector<VocabOrder> orders;  // of each rank's rows, not shared yet
  // The same tiles in one order, those of the ranks one after another: what one rank would have to
  // walk to do the same. Not of splits within tiles.
  VocabOrder whole;
};

// Whole tiles of an order dealt out one by one; the last, which may be short, to the last rank.
FarSplit deal_tiles(const VocabOrder& order, int ranks);
// These words on each rank, in the order that they have among them; tiles are others.
FarSplit split_order(const VocabOrder& order, const WordSplit& words);

// A far-field call on all ranks, `run` as of call_far.
FarAnswer call_sharded_far(const FarProblem& problem, const FarSplit& split, RunSpec run,
                           const TokenSplit& tokens = {}, unsigned delays = 0,
                           std::atomic<std::int64_t>* sent = nullptr);

}  // namespace logitless::test

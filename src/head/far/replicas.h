// Heads of the same words on several ranks, each with tokens of its own: what they decide by is of
// all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/cross_entropy.h"
#include "logitless/vocab_order.h"

namespace logitless {

using FarFacts = std::vector<std::pair<std::string, std::string>>;  // FarController::common()

// Collective, as all below. What the ranks found in a step: the mean of what those with tokens
// keep, errors over all tokens audited of ranks that had a gradient to judge by, whether one fell
// back to a dense plan. Throws InvalidArgument on all ranks where `common` differs.
FarFieldStatistics far_statistics_of_replicas(Communicator& ranks, const FarFacts& common,
                                              const FarFieldStatistics& mine);

// The order that the first rank with tokens makes, on all of them: none where no rank has tokens,
// or one that has some would not take the far field for them. What making it throws all throw.
// Extra memory: twice the order's bytes, and 1 MiB for each rank.
struct ReplicasOrder {
  bool tokens = false;  // a rank has some
  VocabOrder order = {};
};
ReplicasOrder order_of_replicas(Communicator& ranks, const FarFacts& common, bool tokens, bool far,
                                const std::function<VocabOrder()>& make);

}  // namespace logitless

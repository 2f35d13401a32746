// Data-parallel heads: full vocabularies on several ranks, each with its own tokens. Decisions use
// the statistics of all of them.
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

// Combines the statistics of a step over all ranks; collective, like everything below. The fraction
// of selected tiles is the mean over ranks with tokens. Errors are over all audited tokens of ranks
// with a nonzero gradient. dense_fallback is set if any rank fell back. Throws InvalidArgument on
// all ranks if `common` differs.
FarFieldStatistics far_statistics_of_replicas(Communicator& ranks, const FarFacts& common,
                                              const FarFieldStatistics& mine);

// Makes an order on the first rank with tokens, and returns it on all of them. Returns none if no
// rank has tokens, or one with tokens would not use the far field for them. Errors are thrown on
// all ranks. Extra memory: twice the order's bytes, and 1 MiB for each rank.
struct ReplicasOrder {
  bool tokens = false;  // some rank has tokens
  VocabOrder order = {};
};
ReplicasOrder order_of_replicas(Communicator& ranks, const FarFacts& common, bool tokens, bool far,
                                const std::function<VocabOrder()>& make);

}  // namespace logitless

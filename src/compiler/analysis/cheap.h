// Values that are cheap enough for each reader to recompute.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// The most steps of a cheap value, with those of its operands; none may be costly.
inline constexpr int kCheapSteps = 8;
// Returns whether the node computes an exponential or the like.
bool is_costly(const Node& node);

}  // namespace logitless::ir

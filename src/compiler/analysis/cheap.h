// Values that are cheap enough for each reader to recompute.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// The most steps of a cheap value, with those of its operands; none may be costly.
inline constexpr int kCheapSteps = 8;
// Returns whether the node computes an exponential or the like.
bool is_costly(const Node& node);
// Returns whether a loop that computes an operand of the node rounds it to its 16 bits first: a
// number is compared as it would be in memory, where a maximum of such numbers is.
bool rounds_operand(const Graph& graph, const Node& node, Value operand);

}  // namespace logitless::ir

// Finds the point of a graph at which the most bytes are live.
#pragma once

#include <cstdint>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns the bytes of all results of a node.
std::int64_t bytes_of_node(const Node& node);

// Returns the node before which the most bytes are live, if every value but views has separate
// memory. Sizes are bound.
int busiest(const Graph& graph);

}  // namespace logitless::ir

// Where in a graph the most bytes live.
#pragma once

#include <cstdint>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Of all results.
std::int64_t bytes_of_node(const Node& node);

// The node before which the most bytes live, as if every value that is not a view had memory of its
// own. Sizes are bound.
int busiest(const Graph& graph);

}  // namespace logitless::ir

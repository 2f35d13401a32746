// Nodes that need not be there.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Without the nodes that no result depends on; parameters stay.
Graph eliminate_dead(const Graph& graph);
Graph eliminate_dead(Graph&& graph);
// Equal operations on equal operands become one.
Graph eliminate_common(const Graph& graph);
Graph eliminate_common(Graph&& graph);
// Only where one loop reads two equal values: copies that were made to be far apart are now
// together.
Graph eliminate_common_of_loops(Graph graph);

}  // namespace logitless::ir

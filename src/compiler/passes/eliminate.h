// Removes redundant nodes.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Removes nodes that no result depends on; parameters stay.
Graph eliminate_dead(const Graph& graph);
Graph eliminate_dead(Graph&& graph);
// Merges equal operations on equal operands.
Graph eliminate_common(const Graph& graph);
Graph eliminate_common(Graph&& graph);
// Merges only equal values that one loop reads: copies that were made for distant readers are now
// adjacent.
Graph eliminate_common_of_loops(Graph graph);

}  // namespace logitless::ir

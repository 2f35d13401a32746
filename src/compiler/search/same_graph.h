// Compares two graphs.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns whether two graphs are equal node by node, with the bodies of loops. Names and source
// locations may differ. May return false for equal graphs with fused_dot or with loops of other
// symbols.
bool same_graph(const Graph& a, const Graph& b);

}  // namespace logitless::ir

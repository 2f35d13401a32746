// Whether two graphs are one program.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Node by node, loops' bodies included; names and places may differ. False of some that are equal:
// those with fused_dot, and those whose loops have other symbols.
bool same_graph(const Graph& a, const Graph& b);

}  // namespace logitless::ir

// Which values of elementwise operations get memory, and which are computed where they are read.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// For each node: true when it is a map, cast, constant or iota whose value has no memory of its
// own: each reader computes it. Readers are maps, casts and reductions. A value with several
// readers is computed in each when that is a few cheap steps, and stored otherwise.
std::vector<bool> inlined_nodes(const Graph& graph);

// map, cast, broadcast of a constant, constant, iota: what a pointwise loop can compute.
bool is_elementwise(const Node& node);

}  // namespace logitless::ir

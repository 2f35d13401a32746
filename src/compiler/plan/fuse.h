// Decides which elementwise values are stored, and which are computed where they are read.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns for each node whether it is inlined: a map, cast, constant or iota without memory, which
// each reader computes. Readers are maps, casts and reductions. A value with several readers is
// inlined if it takes a few cheap steps or is one of `again`.
std::vector<bool> inlined_nodes(const Graph& graph, const std::vector<int>& again = {});

// Returns whether each reader of an elementwise value could compute it with the same bits. The
// value must be f32 or f64 and no result of the graph.
bool may_be_recomputed(const Graph& graph, int node);

// Returns whether a pointwise loop can compute the node: map, cast, broadcast of a constant,
// constant, iota.
bool is_elementwise(const Node& node);

}  // namespace logitless::ir

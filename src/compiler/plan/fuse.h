// Which values of elementwise operations get memory, and which are computed where they are read.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// For each node: true when it is a map, cast, constant or iota whose value has no memory of its
// own: each reader computes it. Readers are maps, casts and reductions. A value with several
// readers is computed in each when that is a few cheap steps, or it is one of `again`, and stored
// otherwise.
std::vector<bool> inlined_nodes(const Graph& graph, const std::vector<int>& again = {});

// Whether each reader of an elementwise value could compute it, with the same bits: it is no result
// and in f32 or f64.
bool may_be_made_again(const Graph& graph, int node);

// map, cast, broadcast of a constant, constant, iota: what a pointwise loop can compute.
bool is_elementwise(const Node& node);

}  // namespace logitless::ir

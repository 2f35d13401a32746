// Decides which elementwise values are stored, and which are computed where they are read.
#pragma once

#include <functional>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

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

// Recomputes elementwise values with several readers if they are live at the peak and it is worth
// the time: returns the program that `lower` makes without recomputed values, or with those of a
// few rounds. Each round adds the values at the peak of the previous program. An example is the erf
// of a gelu, which the activation and its gradient read. Results have the same bits.
Program recomputing(const Graph& graph, const Target& target,
                    const std::function<Program(const std::vector<int>& again)>& lower);

}  // namespace logitless::ir

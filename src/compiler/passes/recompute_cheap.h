// Elementwise values that would live over the peak are computed again after it.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Where the most bytes live, between the nodes before and after, a minimum cut chooses what is
// kept: of all sets of values from which the rest can be had by elementwise operations and views,
// the one of the fewest bytes, and of equal ones the one that computes least again. Products,
// reductions and gathers are never run twice. Expects bound sizes; keeps results.
Graph recompute_cheap(const Graph& graph);

}  // namespace logitless::ir

// recompute-cheap: recomputes elementwise values after the peak instead of storing them across it.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Splits the graph where the most bytes are live, and chooses the values to store by a minimum cut.
// All other values must follow from the stored ones by elementwise operations and views. The cut
// has the fewest bytes and, among equals, the least recomputation. Matrix products, reductions and
// gathers never run twice. Expects bound sizes; keeps results.
Graph recompute_cheap(const Graph& graph);

}  // namespace logitless::ir

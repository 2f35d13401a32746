// spread-masks: recomputes masks of indices and small values where they are read.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

//   broadcast(f(iota, small))  ->  f(iota, broadcast(small)), in the shape of the broadcast
//
// This concerns masks of positions and biases by distance. They are elementwise operations, few
// enough for every reader to recompute. Their operands are indices, constants and values of at most
// an eighth of the elements. A broadcast would hold the mask in memory; rewritten it needs none,
// and a chunk makes its own part. Only if all readers are elementwise operations and reductions.
// Sizes are bound.
Graph spread_masks(const Graph& graph);

}  // namespace logitless::ir

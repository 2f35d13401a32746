// spread-masks: what is made of indices and a few numbers is made where it is read.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// broadcast(f(iota, small))  ->  f(iota, broadcast(small)), in the shape of the broadcast
//
// for masks of positions and biases by distance: elementwise operations, few enough that every
// reader computes them for itself, of indices, numbers and values of at most an eighth of the
// elements. A broadcast of such a value would hold it in memory; so made, it has none, and a chunk
// makes its own part. Only where elementwise operations and reductions are all that read it. Sizes
// are bound.
Graph spread_masks(const Graph& graph);

}  // namespace logitless::ir

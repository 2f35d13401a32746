// lift-transposes: computes transposed values of indices and broadcasts in the transposed order.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

//   transpose(eq(iota axis(1), broadcast(x, {0})), {1, 0})
//     ->   eq(iota axis(0), broadcast(x, {1}))
//
// So that a mask or a one-hot tensor in another order needs no memory: loops compute its elements.
// Applies to elementwise values of constants, indices and broadcasts alone.
Graph lift_transposes(const Graph& graph);

}  // namespace logitless::ir

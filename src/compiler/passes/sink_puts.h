// sink-puts: adds elements to a value after it is computed.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

//   p = put(i, u)  x = ...  y = p + x     ->     x = ...  p = put(i, u)  y = p + x
//
// Applies if only the sum reads p, which is then added to the memory of x, not stored beside it.
// Results, parameters and their order stay.
Graph sink_puts(const Graph& graph);

}  // namespace logitless::ir

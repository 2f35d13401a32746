// sink-puts: elements are put into a value after it is made.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// p = put(i, u)  x = ...  y = p + x     ->     x = ...  p = put(i, u)  y = p + x
//
// where only the sum reads p: it is then written into the memory of x, not beside it. Results,
// parameters and their order stay.
Graph sink_puts(const Graph& graph);

}  // namespace logitless::ir

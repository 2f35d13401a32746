// sink-picks: reads elements of a value's operands instead of the value.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

//   y = exp(x - r)  p = pick(y, i)     ->     p = exp(pick(x, i) - r), 0 where i is out of range
//
// Applies to big values of elementwise operations on other values, rows' numbers, constants and
// indices. Elements are computed once more; the value itself need not be stored for the pick.
// Expects bound sizes; keeps results and their types.
Graph sink_picks(const Graph& graph);

}  // namespace logitless::ir

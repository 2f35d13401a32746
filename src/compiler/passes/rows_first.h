// rows-first: reduces the last dimension of a big value first, and its results next.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

//   reduce_sum(x, {0, 1}): f32     ->     reduce_sum(reduce_sum(x, {1}): f32[N], {0})
//
// So that a reduction of a whole value is one of its rows, which loops over rows fuse with the
// others. Sums in between are at least f32. Expects bound sizes; keeps results and their types.
Graph rows_first(const Graph& graph);

}  // namespace logitless::ir

// refine-axes: splits the rows of a matrix product into the dimensions that its readers use.
#pragma once

#include <optional>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Refines dimensions around `seed`, the result of a matrix product. A dimension that a reshape
// splits later is split from the product on. A dimension that is sliced at multiples of a part (the
// chosen and the rejected half of a batch) is split into these parts. All operations in between are
// rewritten. Reshapes are added at operands of matrix products, parameters and results.
//
//    reshape(dot(h[6, D], w)) : [2, 3, V]   ->   dot(reshape(h) [2, 3, D], w)
//
// This adds no work, lets a slice move above the product (narrow.h) and lets a chunk hold full
// sequences or pairs of them. Sizes are bound. Returns nothing if nothing changes.
std::optional<Graph> refine_axes(const Graph& graph, Value seed);

// Returns the largest result of a matrix product; invalid if there is none.
Value largest_product(const Graph& graph);

}  // namespace logitless::ir

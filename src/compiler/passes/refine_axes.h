// refine-axes: the rows of a product as the dimensions that its readers make of them.
#pragma once

#include <optional>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Around `seed`, the result of a product: a dimension that a reshape on the way makes several of is
// several from the product on, and one that is sliced at multiples of a part (the chosen and the
// rejected half of a batch) is parts of it. Every operation in between is written for those
// dimensions; where nothing says how, at operands of products, parameters and results, there is a
// reshape.
//
//   reshape(dot(h[6, D], w)) : [2, 3, V]   ->   dot(reshape(h) [2, 3, D], w)
//
// No work is added, and a slice can move above the product (narrow.h), a chunk hold whole sequences
// or pairs of them. Sizes are bound. Nothing where nothing changes.
std::optional<Graph> refine_axes(const Graph& graph, Value seed);

// The largest result of a product, and not valid() where there is none.
Value largest_product(const Graph& graph);

}  // namespace logitless::ir

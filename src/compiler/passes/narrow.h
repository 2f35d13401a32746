// narrow: computes values only where they are read and not zero.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

//   slice(dot(h, w))      ->  dot(slice(h), w)
//   dot(pad(d), w)        ->  pad(dot(d, w))
//   dot(pad(d)^T, h)      ->  dot(d^T, slice(h))
//   pad(a) + pad(b)       ->  pad(a + b), over the hull of both
//
// and the same through operations in between. Each value is computed in one box: the hull over all
// readers, without indices where only zeros are. Matrix products with the zeros of a pad are
// skipped, so an infinite factor of such a zero makes no NaN. Sizes are bound; results, parameters
// and their order stay.
Graph narrow(const Graph& graph);

// Also refines the rows of the largest matrix product (refine_axes.h) if that saves work.
Graph narrow_products(const Graph& graph);

}  // namespace logitless::ir

// narrow: values are computed only where something reads them and where they are not zero.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// slice(dot(h, w))      ->  dot(slice(h), w)
// dot(pad(d), w)        ->  pad(dot(d, w))
// dot(pad(d)^T, h)      ->  dot(d^T, slice(h))
// pad(a) + pad(b)       ->  pad(a + b), of what both pad
//
// and through what stands between. For each value the box of indices that is read and outside of
// which nothing but zeros is: the hull over its readers. Products with the zeros of a pad are not
// formed, so that an infinite number that only they would meet makes no NaN. Sizes are bound;
// results, parameters and their order stay.
Graph narrow(const Graph& graph);

// The same, with the rows of the largest product refined (refine_axes.h) where that saves products.
Graph narrow_products(const Graph& graph);

}  // namespace logitless::ir

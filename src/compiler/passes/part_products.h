// Products of dimensions that have no strides of their own.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// A dimension of a product that a reshape made of several others, which do not follow one another
// in memory (the experts and their units of an einsum, the rows and columns of images whose
// channels stand before them), is as many dimensions of the product again:
//   dot (reshape %x : [N, E F]), %w  ->  reshape (dot %x : [N, E, F], %w)
// so that the operand need not be copied, and a result that is moved back can be made where it
// belongs; reshapes of reshapes are one. For targets whose products take any strides. Results are
// the same up to the order of sums over dimensions that were one.
Graph part_products(const Graph& graph);

}  // namespace logitless::ir

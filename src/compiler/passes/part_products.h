// part-products: splits dimensions of matrix products that have no single stride.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// A reshape can merge dimensions that are not adjacent in memory. Examples are the experts and
// their units in an einsum, and the rows and columns of images with channels first. The matrix
// product then gets the original dimensions instead:
//    dot (reshape %x : [N, E F]), %w  ->  reshape (dot %x : [N, E, F], %w)
// So the operand needs no copy, and a transposed result can be written in place. Chains of reshapes
// become one. Meant for targets whose matrix products take any strides. Results are equal up to the
// order of sums over split dimensions.
Graph part_products(const Graph& graph);

}  // namespace logitless::ir

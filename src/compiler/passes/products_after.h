// products-after: takes the matrix products that contract a region's big 16-bit values out of it.
//
// Example: logits [N, V] that are cut along N, and their gradient in 16 bits, which two products
// contract: with the weight, and with the hidden state. The loop then stores the gradient, a value
// of [N, V] in 16 bits, and the products run once, after the loop. No logit is computed twice. The
// gradient of the weight is no sum over chunks, which would be [V, D] in fp32 and be read and
// written in each chunk.
#pragma once

#include <optional>

#include "compiler/analysis/region.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns the region without these products and without its nodes that read them. Returns nothing
// if there are none, if the region has several phases, or if a big value depends on one of them.
std::optional<Region> products_after(const Graph& graph, const Region& region);

}  // namespace logitless::ir

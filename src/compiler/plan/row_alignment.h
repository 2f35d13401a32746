// Chooses values whose rows are aligned for matrix products.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns operands and results of dots whose rows do not begin at multiples of `bytes`, in order.
// Stacked results of loops are among them, and values that a loop's body multiplies. Their rows are
// long, so padding loses little memory, and all readers accept gaps. Sizes are bound.
std::vector<Value> values_of_products(const Graph& graph, std::int64_t bytes);

}  // namespace logitless::ir

// Which values have rows that begin at multiples of what products want.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Operands and results of dots, whose own rows do not begin at multiples of `bytes`: long ones, so
// that little memory is lost, and read by nothing that wants them side by side. In order. Sizes are
// bound.
std::vector<Value> values_of_products(const Graph& graph, std::int64_t bytes);

}  // namespace logitless::ir

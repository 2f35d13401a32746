// Finds indices that are distinct along an axis by the operation that makes them.
#pragma once

#include <cstdint>
#include <optional>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns the number of different indices, of which none is in two elements that agree in all
// dimensions but `axis`: a sort of n elements along it has some of [0, n). Nothing where they may
// be equal, as those of a parameter. Sizes are constant.
std::optional<std::int64_t> distinct_along(const Graph& graph, Value indices, int axis);

}  // namespace logitless::ir

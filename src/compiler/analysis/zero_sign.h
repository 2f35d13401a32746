// Finds nodes where -0 instead of 0 makes a difference, by the rules of the operations.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns for each node whether the sign of a zero in its results is visible, in a result of the
// graph or in a division.
std::vector<bool> zero_sign_is_seen(const Graph& graph);

// Returns for each node whether its results never hold -0, for any parameters.
std::vector<bool> has_no_negative_zero(const Graph& graph);

}  // namespace logitless::ir

// Where -0 instead of 0 makes a difference, by what the operations' rows say.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// For each node: whether the sign of a zero in one of its results can be seen: in a result of the
// graph, or by what divides by it.
std::vector<bool> zero_sign_is_seen(const Graph& graph);

// For each node: whether no result of it holds -0, whatever the parameters hold.
std::vector<bool> has_no_negative_zero(const Graph& graph);

}  // namespace logitless::ir

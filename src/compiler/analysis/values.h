// Properties of values that follow from the operations that make them; each is in a file of its
// name.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// --- cheap.cpp: values that are cheap enough for each reader to recompute

// The most steps of a cheap value, with those of its operands; none may be costly.
inline constexpr int kCheapSteps = 8;
// Returns whether the node computes an exponential or the like.
bool is_costly(const Node& node);
// Returns whether a loop that computes an operand of the node rounds it to its 16 bits first: a
// number is compared as it would be in memory, where a maximum of such numbers is.
bool rounds_operand(const Graph& graph, const Node& node, Value operand);

// --- distinct.cpp

// Returns the number of different indices, of which none is in two elements that agree in all
// dimensions but `axis`: a sort of n elements along it has some of [0, n). Nothing where they may
// be equal, as those of a parameter. Sizes are constant.
std::optional<std::int64_t> distinct_along(const Graph& graph, Value indices, int axis);

// --- zero_sign.cpp: where -0 instead of 0 makes a difference

// Returns for each node whether the sign of a zero in its results is visible, in a result of the
// graph or in a division.
std::vector<bool> zero_sign_is_seen(const Graph& graph);

// Returns for each node whether its results never hold -0, for any parameters.
std::vector<bool> has_no_negative_zero(const Graph& graph);

}  // namespace logitless::ir

// What each of several readers computes for itself.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// At most so many steps, operands among them, and nothing costly.
inline constexpr int kCheapSteps = 8;
// An exponential and the like.
bool is_costly(const Node& node);

}  // namespace logitless::ir

// Log-sum-exps that a softmax subtracts, and heads.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// select(abs(lse) < inf, lse, NaN)  ->  lse, of a lse that a head of the engine makes.
//
// Frontends write that of a softmax, which is NaN of a row that holds inf. The engine's head is no
// number there, either. Nothing else changes; find_head() sees heads in the result.
Graph drop_settling(const Graph& graph);

}  // namespace logitless::ir

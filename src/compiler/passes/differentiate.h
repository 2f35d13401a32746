// Reverse-mode differentiation: one rule per operation.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/ir/text.h"

namespace logitless::ir {

// Appends the gradients of sum_i <outputs[i], cotangents[i]> with respect to `wrt` to the graph.
// Each has the type of its value, and is zero if no output depends on it. An invalid cotangent
// stands for ones.
//
// Where a function has no derivative (ties of max, abs at 0) the choice is PyTorch's. Throws
// InvalidArgument with the operation if it has no rule: loops, and second derivatives of attention.
std::vector<Value> gradients(Graph& graph, const std::vector<Value>& outputs,
                             const std::vector<Value>& cotangents, const std::vector<Value>& wrt);

// Adds the results d_PARAMETER of a request, or OUTPUT.d_PARAMETER if there are several requests.
Graph differentiate(const Graph& graph, const std::vector<GradientRequest>& requests);

}  // namespace logitless::ir

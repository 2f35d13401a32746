// Reverse-mode differentiation: one rule per operation.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/ir/text.h"

namespace logitless::ir {

// Appends to the graph the gradients of sum_i <outputs[i], cotangents[i]> with respect to each of
// `wrt`, each of the type of its value; a value that nothing depends on gets zeros. A cotangent
// that is not valid() is ones. Where a function has no derivative (ties of max, abs at 0) the
// choice is PyTorch's. Throws InvalidArgument naming the operation that has no rule: loops, and
// second derivatives of attention.
std::vector<Value> gradients(Graph& graph, const std::vector<Value>& outputs,
                             const std::vector<Value>& cotangents, const std::vector<Value>& wrt);

// Adds the results d_PARAMETER of a request, or OUTPUT.d_PARAMETER where there are several
// requests.
Graph differentiate(const Graph& graph, const std::vector<GradientRequest>& requests);

}  // namespace logitless::ir

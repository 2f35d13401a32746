// What a call of the caller's is taken to compute.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Multiply-adds: some for each element of its largest tensor, in every part along which it can be
// cut. So chunks together compute what the whole does, and what is computed twice shows. Sizes are
// bound.
double extern_work(const Graph& graph, const Node& node);

}  // namespace logitless::ir

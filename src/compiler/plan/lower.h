// A graph of bound sizes becomes a Program.
#pragma once

#include "compiler/plan/program.h"

namespace logitless::ir {

// Instructions in the order of the nodes, memory planned. `threads` sizes the scratch of products.
// Throws Unsupported naming an operation and dtype that no kernel takes.
Program lower(const Graph& graph, int threads);

}  // namespace logitless::ir

// A graph of bound sizes becomes a Program.
#pragma once

#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// Instructions in the order of the nodes, memory planned. `added`: by the graph's outputs, whether
// one is added to what the caller's memory holds; empty: none is. Throws Unsupported naming an
// operation and dtype that no kernel of the target takes.
Program lower(const Graph& graph, const Target& target, const std::vector<bool>& added = {});

}  // namespace logitless::ir

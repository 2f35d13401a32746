// Nodes that play one role in several places of a program: the layers of a network.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// A number for each node: equal for nodes of the same operation, dimensions and types whose
// operands and readers are so, too. Unequal nodes have unequal numbers but for accidents of a
// 64-bit hash, so what follows from it must hold for any nodes.
std::vector<std::uint64_t> roles_of(const Graph& graph);

}  // namespace logitless::ir

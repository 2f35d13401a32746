// Finds nodes that play the same role in repeated parts of a program, as in the layers of a
// network.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns a hash for each node. Nodes have equal hashes if they have the same operation, dimensions
// and types, and operands and readers with equal hashes. Different nodes may collide, so
// conclusions from equal hashes must be harmless for any nodes.
std::vector<std::uint64_t> roles_of(const Graph& graph);

}  // namespace logitless::ir

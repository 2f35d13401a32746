// Fuses operations on the results of matrix products into their epilogues, which saves passes over
// memory.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

struct WithEpilogues {
  Graph graph;
  std::vector<int> origin;  // by node: the node of the original graph that it stands for
};

// Fuses 16-bit dots and their readers into fused_dot nodes:
//
//   - dot + bias: the bias along the last dimension
//   - dot [+ bias] + x: x in memory, the sum read more than once or not by a loop, and the product
//     not deeper than wide
//   - gelu(dot [+ bias]), if `with_gelu`: the tanh form (plan/gelu_pattern.h), not read by loops
//     alone. The sum is stored, too; further equal gelus stay loops
//   - dot * gelu'(x), if `with_gelu`: x in memory, the product not read by loops alone
//
// Values in between must not be results, and must have no other readers, except functions of a
// stored sum. The new node is at the position of the last node that it replaces, or at the stored
// sum. Sizes are bound. Results, their order and their types stay.
WithEpilogues fuse_epilogues(const Graph& graph, bool with_gelu);

}  // namespace logitless::ir

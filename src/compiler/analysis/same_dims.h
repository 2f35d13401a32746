// Finds dimensions that an operation preserves: each index is the same in an operand and in the
// result.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

struct SameDim {
  std::size_t operand = 0;
  int from = 0;  // dimension of the operand
  int to = 0;    // of the result
};

// Returns the preserved dimensions of a node with one result that can be computed in parts; empty
// for other nodes. A reshape preserves unsplit dimensions; a slice or a pad preserves those of
// unchanged size.
std::vector<SameDim> same_dims(const Graph& graph, int node);

// Returns the pairs of dimensions that a dot sums over.
std::vector<std::pair<int, int>> summed_dims(const Node& dot);

// Returns the multiply-adds of all matrix products of the graph, without those in loops.
double product_work(const Graph& graph);

}  // namespace logitless::ir

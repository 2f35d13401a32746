// Dimensions that an operation leaves as they are: index by index the same in an operand and in the
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

// Of a node of one result that a part of can be computed by itself; empty for all others. Of a
// reshape, the dimensions that stay one; of a slice or a pad, those that stay whole.
std::vector<SameDim> same_dims(const Graph& graph, int node);

// Dimensions of each operand of a dot that it sums over, in pairs.
std::vector<std::pair<int, int>> summed_dims(const Node& dot);

// Multiply-adds of all products of the graph; loops are not counted.
double product_work(const Graph& graph);

}  // namespace logitless::ir

// Products that do more than multiply: what is added to their results becomes part of them, so that
// it costs no pass over memory.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

struct WithEpilogues {
  Graph graph;
  std::vector<int> origin;  // the node of the graph before that each stands for
};

// Dots in 16 bits and what follows them become one fused_dot each:
//
//   dot + bias          the bias along the last dimension
//   dot [+ bias] + x    x in memory, the sum read more than once or by no loop, and the product not
//                       deeper than wide
//
// Values on the way have one reader and are no results. The node stands where the last of those
// that it replaces stood. Sizes are bound. Results, their order and their types stay.
WithEpilogues fuse_epilogues(const Graph& graph);

}  // namespace logitless::ir

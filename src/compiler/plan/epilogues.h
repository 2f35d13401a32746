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
//   gelu(dot [+ bias])  of `with_gelu`, by tanh (plan/gelu_pattern.h), read by more than loops; the
//   sum stays beside
//                       it. The first of equal ones: what is computed again stays a loop
//   dot * gelu'(x)      of `with_gelu`, x in memory, the product of it read by more than loops
//
// Values on the way are no results, and nothing else reads them, but functions of a sum that stays.
// The node stands where the last of those that it replaces stood, or at the sum that stays. Sizes
// are bound. Results, their order and their types stay.
WithEpilogues fuse_epilogues(const Graph& graph, bool with_gelu);

}  // namespace logitless::ir

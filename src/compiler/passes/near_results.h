// near-results: marks divisions and square roots whose last bits make no difference.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Marks the divisions and square roots that may be off by 2 units in the last place of f32. Those
// of 16 bits may: they are rounded again. Of f32 those may on which no function that jumps depends,
// as floor and comparisons do; behind one that rounds anyway, such as exp, a jump does not count. A
// GPU multiplies by the reciprocal. All copies of a node have its mark, so that a logit that is
// picked equals the one of the row's log-sum-exp.
Graph mark_near_results(const Graph& graph);

}  // namespace logitless::ir

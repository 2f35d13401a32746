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
//   - gelu(dot [+ bias]), if `with_gelu`: the tanh form (is_gelu), not read by loops
//     alone. The sum is stored, too; further equal gelus stay loops
//   - dot * gelu'(x), if `with_gelu`: x in memory, the product not read by loops alone
//
// Values in between must not be results, and must have no other readers, except functions of a
// stored sum. The new node is at the position of the last node that it replaces, or at the stored
// sum. Sizes are bound. Results, their order and their types stay.
WithEpilogues fuse_epilogues(const Graph& graph, bool with_gelu);

// --- gelu_pattern.cpp: recognises gelu and its derivative by their values, however they are
// written

// Returns whether `top` is gelu(x) in the tanh form, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715
// x^3))). It must be computed from x and constants by elementwise functions, without rounding to
// less than x's dtype. It must agree to 1e-10 at points in all parts of gelu. The erf form differs
// by 1e-4 there.
bool is_gelu(const Graph& graph, Value top, Value x);

// Returns likewise whether `top` is dy times the derivative of that gelu at x.
bool is_gelu_gradient(const Graph& graph, Value top, Value dy, Value x);

}  // namespace logitless::ir

// The input of an operation's degree rule: a node, and the degree of each operand in one scalar.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Degrees: 0 is independent of the scalar, 1 is linear and homogeneous in it, -1 is neither.
struct Linearity {
  const Graph& graph;
  const Node& node;
  std::vector<int> in;  // degrees of the operands: 0 or 1, and at least one is 1

  // Returns 1 if all operands from `first` on have degree 1 or are zeros.
  int equal(std::size_t first) const;
  // Returns 1 if operand i does not depend on the scalar.
  int without(std::size_t i) const { return in[i] == 0 ? 1 : -1; }
  // Returns the degree of a product of the first two operands.
  int product() const { return in[0] + in[1] <= 1 ? 1 : -1; }
};

// Returns the degree of each node in a scalar.
std::vector<int> degrees(const Graph& graph, Value scalar);

}  // namespace logitless::ir

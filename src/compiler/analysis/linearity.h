// What an operation's degree rule sees: a node, and the degree of each operand in one scalar.
#pragma once

#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Degrees: 0 does not depend on the scalar, 1 is linear and homogeneous in it, -1 is neither.
struct Linearity {
  const Graph& graph;
  const Node& node;
  std::vector<int> in;  // of the operands: 0 or 1, and one of them is 1

  // 1 where all operands from `first` on are of degree 1, but for zeros.
  int equal(std::size_t first) const;
  // 1 where operand i does not depend on the scalar.
  int without(std::size_t i) const { return in[i] == 0 ? 1 : -1; }
  // A product of the first two.
  int product() const { return in[0] + in[1] <= 1 ? 1 : -1; }
};

// Of each node in one scalar.
std::vector<int> degrees(const Graph& graph, Value scalar);

}  // namespace logitless::ir

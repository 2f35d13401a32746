// The context of a gradient rule: one node, the gradients of its results, and the graph to which
// the rule adds the gradients of its operands.
#pragma once

#include <utility>
#include <vector>

#include "compiler/ir/build.h"

namespace logitless::ir {

class Derivation {
 public:
  // gradients[i]: gradient of result i, invalid if nothing depends on it; that of result 0 is
  // valid. wanted[i]: something needs the gradient of operand i.
  Derivation(Graph& graph, int node, std::vector<Value> gradients, std::vector<bool> wanted)
      : g(graph),
        n(graph.node(node)),
        results(std::move(gradients)),
        dy(results[0]),
        wanted_(std::move(wanted)),
        id_(node) {}

  Graph& g;
  const Node n;  // a copy, since the graph grows
  const std::vector<Value> results;
  const Value dy;

  bool wanted(std::size_t i) const { return wanted_[i]; }
  Value x(std::size_t i) const { return n.operands[i]; }
  Value y(int i = 0) const { return {id_, i}; }
  const Type& operand_type(std::size_t i) const { return g.type(n.operands[i]); }
  // Returns a constant of the first result's type.
  Value number(double value) { return constant(g, value, n.results[0]); }
  Value op(Function f, Value a, Value b = {}, Value c = {}) {
    std::vector<Value> operands = {a};
    if (b.valid()) operands.push_back(b);
    if (c.valid()) operands.push_back(c);
    return map(g, f, std::move(operands));
  }
  Value times(Value a, Value b) { return op(Function::mul, a, b); }
  // Returns no gradient for any operand.
  std::vector<Value> none() const { return std::vector<Value>(n.operands.size()); }

 private:
  std::vector<bool> wanted_;
  int id_;
};

}  // namespace logitless::ir

// The graph that a pass writes, node by node, in place of another one.
#pragma once

#include <utility>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

class Rewriter {
 public:
  explicit Rewriter(const Graph& from) : from_(from) {
    out.name = from.name;
    out.reserve(from.size());
  }

  Graph out;

  // Returns what stands for a value of an earlier node.
  Value operator()(Value v) const {
    const Value first = to_[static_cast<std::size_t>(v.node)];
    return {first.node, first.index + v.index};
  }
  std::vector<Value> operands_of(int id) const {
    std::vector<Value> operands;
    for (const Value v : from_.node(id).operands) operands.push_back((*this)(v));
    return operands;
  }
  // Adds a node with other attributes.
  Value with(int id, Attributes attributes) {
    const Node& n = from_.node(id);
    return out.add(n.op, operands_of(id), std::move(attributes), n.name);
  }
  // Writes what replace(id) returns, the first result in place of the node's, or a copy of the node
  // where that is invalid. Returns the graph.
  template <typename Replace>
  Graph run(const Replace& replace) {
    for (int id = 0; id < from_.size(); ++id) {
      const Value made = replace(id);
      to_.push_back(made.valid() ? made : out.copy(from_, id, operands_of(id)));
    }
    for (const Output& o : from_.outputs()) out.add_output(o.name, (*this)(o.value));
    return std::move(out);
  }

 private:
  const Graph& from_;
  std::vector<Value> to_;  // by node: its new first result
};

}  // namespace logitless::ir

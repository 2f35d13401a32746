#include "compiler/analysis/linearity.h"

#include <algorithm>

#include "compiler/ops/op.h"

namespace logitless::ir {

int Linearity::equal(std::size_t first) const {
  for (std::size_t i = first; i < in.size(); ++i) {
    const Node& operand = graph.node(node.operands[i]);
    const bool zero = operand.op == Op::constant && operand.attributes->number == 0.0;
    if (in[i] != 1 && !zero) return -1;
  }
  return 1;
}

std::vector<int> degrees(const Graph& graph, Value scalar) {
  std::vector<int> degree(static_cast<std::size_t>(graph.size()), 0);
  degree[static_cast<std::size_t>(scalar.node)] = 1;
  for (int id = scalar.node + 1; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    Linearity operands{graph, n, {}};
    for (const Value v : n.operands)
      operands.in.push_back(degree[static_cast<std::size_t>(v.node)]);
    const auto has = [&](int d) {
      return std::find(operands.in.begin(), operands.in.end(), d) != operands.in.end();
    };
    int& d = degree[static_cast<std::size_t>(id)];
    if (has(-1)) {
      d = -1;
    } else if (has(1)) {
      const auto rule = row_of(n.op).degree;
      d = rule != nullptr ? rule(operands) : -1;
    }
  }
  return degree;
}

}  // namespace logitless::ir

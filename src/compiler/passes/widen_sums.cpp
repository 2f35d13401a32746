#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {

Graph widen_sums(const Graph& graph) {
  const auto size = static_cast<std::size_t>(graph.size());
  std::vector<int> uses(size, 0);
  for (const Node& n : graph.nodes()) {
    for (const Value v : n.operands) ++uses[static_cast<std::size_t>(v.node)];
  }
  for (const Output& o : graph.outputs()) ++uses[static_cast<std::size_t>(o.value.node)];
  const auto is_sum = [](const Node& n) {
    return row_of(n.op).sums && (n.op != Op::reduce || n.attributes->reduce == Reduce::sum);
  };
  std::vector<bool> wide(size), dropped(size);
  for (int id = 0; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    if (n.op != Op::cast || n.results[0].dtype != DType::f32) continue;
    Value from = n.operands[0];
    while (uses[static_cast<std::size_t>(from.node)] == 1 &&
           (graph.node(from).op == Op::transpose || graph.node(from).op == Op::reshape))
      from = graph.node(from).operands[0];
    if (uses[static_cast<std::size_t>(from.node)] != 1 || !is_sum(graph.node(from)) ||
        size_of(graph.type(from).dtype) != 2)
      continue;
    wide[static_cast<std::size_t>(from.node)] = true;
    dropped[static_cast<std::size_t>(id)] = true;
  }
  Graph out;
  out.name = graph.name;
  std::vector<Value> to(size);
  const auto value = [&](Value v) {
    const Value first = to[static_cast<std::size_t>(v.node)];
    return Value{first.node, first.index + v.index};
  };
  for (int id = 0; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    std::vector<Value> operands;
    for (const Value v : n.operands) operands.push_back(value(v));
    if (dropped[static_cast<std::size_t>(id)]) {
      to[static_cast<std::size_t>(id)] = operands[0];
      continue;
    }
    if (!wide[static_cast<std::size_t>(id)]) {
      to[static_cast<std::size_t>(id)] = out.copy(graph, id, std::move(operands));
      continue;
    }
    Attributes a = n.attributes;
    a.type.dtype = DType::f32;
    to[static_cast<std::size_t>(id)] = out.add(n.op, std::move(operands), std::move(a), n.name);
  }
  for (const Output& o : graph.outputs()) out.add_output(o.name, value(o.value));
  return out;
}

}  // namespace logitless::ir

#include "compiler/passes/passes.h"

namespace logitless::ir {

Graph sink_puts(const Graph& graph) {
  const Lists<int> users = graph.users();
  std::vector<bool> result(static_cast<std::size_t>(graph.size()));
  for (const Output& o : graph.outputs()) result[static_cast<std::size_t>(o.value.node)] = true;
  const auto sinks = [&](int id) {
    const auto at = static_cast<std::size_t>(id);
    if (graph.node(id).op != Op::put || result[at] || users[at].size() != 1) return false;
    const Node& reader = graph.node(users[at][0]);
    return is_map(reader, Function::add) && reader.operands[0] != reader.operands[1];
  };
  Graph out;
  out.name = graph.name;
  std::vector<int> to(static_cast<std::size_t>(graph.size()), -1);
  const auto copy = [&](int id) {
    const Node& n = graph.node(id);
    std::vector<Value> operands;
    for (const Value v : n.operands)
      operands.push_back({to[static_cast<std::size_t>(v.node)], v.index});
    to[static_cast<std::size_t>(id)] = out.copy(graph, id, std::move(operands)).node;
  };
  for (int id = 0; id < graph.size(); ++id) {
    if (sinks(id)) continue;
    for (const Value v : graph.node(id).operands) {
      if (sinks(v.node)) copy(v.node);
    }
    copy(id);
  }
  for (const Output& o : graph.outputs())
    out.add_output(o.name, {to[static_cast<std::size_t>(o.value.node)], o.value.index});
  return out;
}

}  // namespace logitless::ir

#include <algorithm>
#include <set>

#include "compiler/ops/op.h"
#include "compiler/passes/max_flow.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/recompute_segments.h"

namespace logitless::ir {
namespace {

bool is_cheap(Op op) { return row_of(op).work != Work::full; }

}  // namespace

Graph recompute_cheap(const Graph& graph) {
  const int cut = busiest(graph);
  std::set<int> results;
  for (const Output& o : graph.outputs()) results.insert(o.value.node);
  // Each node before the cut has two flow nodes. The edge between them is cut if the value is
  // stored.
  Flow flow(2 * cut + 2);
  const int source = 2 * cut, sink = 2 * cut + 1;
  for (int id = 0; id < cut; ++id) {
    const Node& n = graph.node(id);
    const bool free = n.op == Op::parameter || results.contains(id);
    flow.add(2 * id, 2 * id + 1, free ? 0 : bytes_of_node(n));
    if (!is_cheap(n.op)) {
      flow.add(source, 2 * id, kInfinite);
      continue;
    }
    for (const Value v : n.operands) flow.add(2 * v.node + 1, 2 * id, kInfinite);
  }
  std::vector<bool> read_after(static_cast<std::size_t>(cut));
  for (int id = cut; id < graph.size(); ++id) {
    for (const Value v : graph.node(id).operands) {
      if (v.node < cut) read_after[static_cast<std::size_t>(v.node)] = true;
    }
  }
  for (int id = 0; id < cut; ++id) {
    if (read_after[static_cast<std::size_t>(id)]) flow.add(2 * id + 1, sink, kInfinite);
  }
  flow.run(source, sink);
  const std::vector<bool> late = flow.reaching(sink);

  Graph out;
  out.name = graph.name;
  std::vector<int> early(static_cast<std::size_t>(graph.size()), -1),
      again(static_cast<std::size_t>(cut), -1);
  const auto copy = [&](int id, auto&& operand) {
    const Node& n = graph.node(id);
    std::vector<Value> operands;
    for (const Value v : n.operands) operands.push_back(operand(v));
    return out.copy(graph, id, std::move(operands)).node;
  };
  // A value that is read after the cut is stored, or recomputed there from stored values.
  auto after = [&](auto&& self, Value v) -> Value {
    const auto at = static_cast<std::size_t>(v.node);
    if (v.node >= cut || !late[2 * at] || !is_cheap(graph.node(v).op)) return {early[at], v.index};
    if (again[at] < 0) again[at] = copy(v.node, [&](Value o) { return self(self, o); });
    return {again[at], v.index};
  };
  for (int id = 0; id < graph.size(); ++id) {
    early[static_cast<std::size_t>(id)] = copy(id, [&](Value v) {
      return id < cut ? Value{early[static_cast<std::size_t>(v.node)], v.index} : after(after, v);
    });
  }
  for (const Output& o : graph.outputs())
    out.add_output(o.name, {early[static_cast<std::size_t>(o.value.node)], o.value.index});
  return eliminate_dead(std::move(out));
}

}  // namespace logitless::ir

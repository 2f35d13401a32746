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

  std::vector<bool> again(static_cast<std::size_t>(cut));
  for (std::size_t id = 0; id < again.size(); ++id)
    again[id] = late[2 * id] && is_cheap(graph.node(static_cast<int>(id)).op);
  return recomputed_after(graph, cut, again);
}

}  // namespace logitless::ir

#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

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
  Rewriter to(graph);
  return to.run([&](int id) -> Value {
    const auto at = static_cast<std::size_t>(id);
    if (dropped[at]) return to(graph.node(id).operands[0]);
    if (!wide[at]) return {};
    Attributes a = graph.node(id).attributes;
    a.type.dtype = DType::f32;
    return to.with(id, std::move(a));
  });
}

}  // namespace logitless::ir

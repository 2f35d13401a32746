#include <utility>
#include <vector>

#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

// Returns for each node whether an error of its results' last bits is visible where a function
// jumps, by the rules of the operations.
std::vector<bool> rounding_is_seen(const Graph& graph) {
  std::vector<bool> seen(static_cast<std::size_t>(graph.size()));
  for (int id = graph.size() - 1; id >= 0; --id) {
    const Node& n = graph.node(id);
    const auto rule = row_of(n.op).rounding;
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      const Rounding rounding = rule != nullptr ? rule(n, i) : Rounding::sees;
      if (rounding == Rounding::sees ||
          (rounding == Rounding::moves && seen[static_cast<std::size_t>(id)]))
        seen[static_cast<std::size_t>(n.operands[i].node)] = true;
    }
  }
  return seen;
}

// Returns whether the node is a division or a root that may be near. One of 16 bits is rounded
// afterwards, which hides the error where the exact result has so few bits.
bool may_be_near(const Node& n, bool seen) {
  if (n.op != Op::map) return false;
  const Function function = n.attributes->function;
  if (function != Function::div && function != Function::sqrt) return false;
  const DType dtype = n.results[0].dtype;
  return dtype == DType::f32 ? !seen : dtype == DType::bf16 || dtype == DType::f16;
}

}  // namespace

Graph mark_near_results(const Graph& graph) {
  const std::vector<bool> seen = rounding_is_seen(graph);
  Rewriter to(graph);
  return to.run([&](int id) -> Value {
    const Node& n = graph.node(id);
    if (!may_be_near(n, seen[static_cast<std::size_t>(id)])) return {};
    Attributes near = n.attributes;
    near.near = true;
    return to.with(id, std::move(near));
  });
}

}  // namespace logitless::ir

#include "compiler/analysis/values.h"
#include "compiler/ops/op.h"

namespace logitless::ir {
namespace {

ZeroSign sign_of(const Node& n, std::size_t operand) {
  const auto rule = row_of(n.op).zero_sign;
  return rule != nullptr ? rule(n, operand) : ZeroSign::sees;
}

}  // namespace

std::vector<bool> zero_sign_is_seen(const Graph& graph) {
  std::vector<bool> seen(static_cast<std::size_t>(graph.size()));
  for (const Output& o : graph.outputs()) seen[static_cast<std::size_t>(o.value.node)] = true;
  for (int id = graph.size() - 1; id >= 0; --id) {
    const Node& n = graph.node(id);
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      const ZeroSign sign = sign_of(n, i);
      const bool passed_on = sign != ZeroSign::loses && seen[static_cast<std::size_t>(id)];
      if (sign == ZeroSign::sees || passed_on)
        seen[static_cast<std::size_t>(n.operands[i].node)] = true;
    }
  }
  return seen;
}

std::vector<bool> has_no_negative_zero(const Graph& graph) {
  std::vector<bool> none(static_cast<std::size_t>(graph.size()));
  for (int id = 0; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    bool all = !n.operands.empty();
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      const ZeroSign sign = sign_of(n, i);
      const bool of_operand = none[static_cast<std::size_t>(n.operands[i].node)];
      all = all && (sign == ZeroSign::loses || (sign == ZeroSign::moves && of_operand));
    }
    none[static_cast<std::size_t>(id)] = all;
  }
  return none;
}

}  // namespace logitless::ir

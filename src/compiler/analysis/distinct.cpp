#include "compiler/analysis/values.h"

namespace logitless::ir {

std::optional<std::int64_t> distinct_along(const Graph& graph, Value indices, int axis) {
  for (Value v = indices;;) {
    const Node& n = graph.node(v);
    switch (n.op) {
      case Op::sort: {
        if (v.index != 1 || n.attributes->axis != axis) return std::nullopt;
        const Dim& size = graph.type(n.operands[0]).shape[static_cast<std::size_t>(axis)];
        return size.is_constant() ? std::optional(size.value()) : std::nullopt;
      }
      case Op::transpose:
        axis = n.attributes->dims[static_cast<std::size_t>(axis)];
        break;
      case Op::slice:
      case Op::flip:
        break;
      default:
        return std::nullopt;
    }
    v = n.operands[0];
  }
}

}  // namespace logitless::ir

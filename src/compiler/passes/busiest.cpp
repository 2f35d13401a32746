#include "compiler/passes/busiest.h"

#include <vector>

#include "compiler/ops/op.h"

namespace logitless::ir {

std::int64_t bytes_of_node(const Node& n) {
  std::int64_t bytes = 0;
  for (const Type& t : n.results) bytes += bytes_of(t);
  return bytes;
}

int busiest(const Graph& graph) {
  std::vector<std::int64_t> change(static_cast<std::size_t>(graph.size()) + 1, 0);
  std::vector<int> last(static_cast<std::size_t>(graph.size()), -1);
  for (int id = 0; id < graph.size(); ++id) {
    for (const Value v : graph.node(id).operands) last[static_cast<std::size_t>(v.node)] = id;
  }
  for (int id = 0; id < graph.size(); ++id) {
    const Op op = graph.node(id).op;
    const bool memory = op != Op::parameter && row_of(op).work != Work::none;
    if (!memory || last[static_cast<std::size_t>(id)] < 0) continue;
    change[static_cast<std::size_t>(id)] += bytes_of_node(graph.node(id));
    change[static_cast<std::size_t>(last[static_cast<std::size_t>(id)])] -=
        bytes_of_node(graph.node(id));
  }
  std::int64_t live = 0, most = -1;
  int at = 0;
  for (int id = 0; id < graph.size(); ++id) {
    live += change[static_cast<std::size_t>(id)];
    if (live > most) {
      most = live;
      at = id;
    }
  }
  return at + 1;
}

}  // namespace logitless::ir

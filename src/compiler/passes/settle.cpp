#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "compiler/ir/build.h"
#include "compiler/passes/find_heads.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

const Node* function_at(const Graph& graph, Value v, Function function) {
  const Node& n = graph.node(v);
  return is_map(n, function) ? &n : nullptr;
}

// The log-sum-exp that node `id` is, or NaN where that is infinite; -1: it is something else.
int settled(const Graph& graph, int id) {
  const Node* select = function_at(graph, {id, 0}, Function::select);
  if (select == nullptr) return -1;
  const Value lse = select->operands[1];
  const Node* test = function_at(graph, select->operands[0], Function::lt);
  const Node& n = graph.node(lse);
  if (test == nullptr || !is_reduce(n, Reduce::lse)) return -1;
  const Node* size = function_at(graph, test->operands[0], Function::abs);
  const std::optional<double> far = number_of(graph, test->operands[1]),
                              none = number_of(graph, select->operands[2]);
  const bool is_guard = size != nullptr && size->operands[0] == lse && far && none &&
                        std::isinf(*far) && std::isnan(*none);
  return is_guard ? lse.node : -1;
}

// The graph in which a node of `instead` is not read, but the one that stands there.
Graph with(const Graph& graph, const std::vector<int>& instead) {
  return Graph(graph).kept(std::vector<bool>(instead.size(), true), instead);
}

}  // namespace

Graph drop_settling(const Graph& graph) {
  std::vector<int> all(static_cast<std::size_t>(graph.size()));
  std::iota(all.begin(), all.end(), 0);
  std::vector<int> of_heads = all;
  bool any = false;
  for (int id = 0; id < graph.size(); ++id) {
    if (const int lse = settled(graph, id); lse >= 0) {
      all[static_cast<std::size_t>(id)] = lse;
      any = true;
    }
  }
  if (!any) return graph;
  const Graph plain = with(graph, all);  // of the same numbers
  const Lists<int> users = plain.users();
  std::vector<bool> is_head(all.size());
  for (int id = 0; id < plain.size(); ++id) {
    if (plain.node(id).op != Op::dot) continue;
    if (const std::optional<FoundHead> head = find_head(plain, users, id); head && head->lse >= 0)
      is_head[static_cast<std::size_t>(head->lse)] = true;
  }
  for (std::size_t id = 0; id < all.size(); ++id) {
    if (is_head[static_cast<std::size_t>(all[id])]) of_heads[id] = all[id];
  }
  return eliminate_common(with(graph, of_heads));
}

}  // namespace logitless::ir

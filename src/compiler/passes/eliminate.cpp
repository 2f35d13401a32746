// eliminate-dead and eliminate-common.
#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

std::vector<int> themselves(const Graph& graph) {
  std::vector<int> ids(static_cast<std::size_t>(graph.size()));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

}  // namespace

Graph eliminate_dead(Graph&& graph) {
  std::vector<bool> live(static_cast<std::size_t>(graph.size()));
  for (const Output& output : graph.outputs())
    live[static_cast<std::size_t>(output.value.node)] = true;
  for (int id = graph.size() - 1; id >= 0; --id) {
    if (graph.node(id).op == Op::parameter) live[static_cast<std::size_t>(id)] = true;
    if (!live[static_cast<std::size_t>(id)]) continue;
    for (const Value v : graph.node(id).operands) live[static_cast<std::size_t>(v.node)] = true;
  }
  if (std::find(live.begin(), live.end(), false) == live.end()) return std::move(graph);
  const std::vector<int> instead = themselves(graph);
  return std::move(graph).kept(live, instead);
}
Graph eliminate_dead(const Graph& graph) { return eliminate_dead(Graph(graph)); }

namespace {

// Returns a hash of some of the data that equal nodes share.
std::size_t hash_of(const Node& n, const std::vector<Value>& operands) {
  std::size_t hash = static_cast<std::size_t>(n.op);
  const auto add = [&](auto value) {
    hash = (hash ^ static_cast<std::size_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  };
  add(n.attributes->function);
  add(n.attributes->axis);
  add(std::bit_cast<std::uint64_t>(n.attributes->number));
  for (const Value v : operands) {
    add(v.node);
    add(v.index);
  }
  for (const Dim& d : n.results[0].shape) add(d.is_constant() ? d.value() : -1);
  return hash;
}

// Returns for each node the first one that computes the same.
std::vector<int> first_equal(const Graph& graph) {
  const auto key_of = [](const Node& n, const std::vector<Value>& operands) {
    const Attributes& a = n.attributes;
    std::vector<std::int64_t> key = {static_cast<std::int64_t>(n.op),
                                     static_cast<std::int64_t>(a.function),
                                     static_cast<std::int64_t>(a.reduce), a.reverse, a.axis};
    for (const auto* list : {&a.dims, &a.batch_a, &a.batch_b, &a.contract_a, &a.contract_b}) {
      key.push_back(-1);
      key.insert(key.end(), list->begin(), list->end());
    }
    for (const Value v : operands) {
      key.push_back(v.node);
      key.push_back(v.index);
    }
    // Compares bits, not values, since -0 and 0, and NaNs, must stay apart.
    const Head& head = a.head;
    for (const double number : {a.number, head.scale, head.softcap, a.scores.softcap})
      key.push_back(std::bit_cast<std::int64_t>(number));
    key.insert(key.end(), {head.bias, head.gradients, head.log_prob, head.ignored.has_value(),
                           head.ignored.value_or(0), head.workspace});
    key.insert(key.end(),
               {a.epilogue.bias, a.epilogue.residual, a.epilogue.gelu, a.epilogue.gelu_gradient});
    key.insert(key.end(), {a.scores.causal, a.scores.window, a.scores.bias, a.scores.segments});
    key.insert(key.end(), {a.call.id, a.call.result});
    for (const std::vector<int>& row : a.call.along) {
      key.push_back(-3);
      key.insert(key.end(), row.begin(), row.end());
    }
    for (const DType gradient : {head.d_x, head.d_w, head.d_bias})
      key.push_back(static_cast<std::int64_t>(gradient));
    const auto push_shape = [&](const Shape& shape) {
      key.push_back(-2);
      for (const Dim& d : shape) {
        key.push_back(d.is_constant() ? 0 : 1);
        key.push_back(d.is_constant()
                          ? d.value()
                          : static_cast<std::int64_t>(std::hash<std::string>()(d.text())));
      }
    };
    for (const Type& result : n.results) {
      key.push_back(static_cast<std::int64_t>(result.dtype));
      push_shape(result.shape);
    }
    push_shape(a.begin);
    push_shape(a.end);
    return key;
  };
  const auto size = static_cast<std::size_t>(graph.size());
  std::vector<int> same(size);
  const auto firsts_of = [&](const Node& n, std::vector<Value>& operands) {
    operands.clear();
    for (const Value v : n.operands)
      operands.push_back({same[static_cast<std::size_t>(v.node)], v.index});
  };
  // A hash table of nodes with linear probing.
  struct Seen {
    std::size_t hash = 0;
    int id = -1;
  };
  std::vector<Seen> seen(std::bit_ceil(2 * size + 1));
  std::vector<Value> operands, of_other;
  for (int id = 0; id < graph.size(); ++id) {
    same[static_cast<std::size_t>(id)] = id;
    const Node& n = graph.node(id);
    if (n.op == Op::parameter || n.op == Op::loop) continue;
    firsts_of(n, operands);
    const std::size_t hash = hash_of(n, operands);
    std::size_t at = hash & (seen.size() - 1);
    for (; seen[at].id >= 0; at = (at + 1) & (seen.size() - 1)) {
      if (seen[at].hash != hash) continue;
      const Node& other = graph.node(seen[at].id);
      firsts_of(other, of_other);
      if (of_other == operands && key_of(other, of_other) == key_of(n, operands)) break;
    }
    if (seen[at].id < 0) {
      seen[at] = {hash, id};
    } else {
      same[static_cast<std::size_t>(id)] = seen[at].id;
    }
  }
  return same;
}

}  // namespace

Graph eliminate_common(Graph&& graph) {
  const std::vector<int> same = first_equal(graph);
  std::vector<bool> keep(same.size());
  bool any = false;
  for (std::size_t id = 0; id < same.size(); ++id) {
    keep[id] = same[id] == static_cast<int>(id);
    any = any || !keep[id];
  }
  return any ? eliminate_dead(std::move(graph).kept(keep, same)) : eliminate_dead(std::move(graph));
}
Graph eliminate_common(const Graph& graph) { return eliminate_common(Graph(graph)); }

Graph eliminate_common_of_loops(Graph graph) {
  const std::vector<int> same = first_equal(graph);
  std::vector<int> to = themselves(graph);
  bool any = false;
  std::map<int, int> first;  // operand of a loop with the least index, by its first equal node
  for (const Node& n : graph.nodes()) {
    if (n.op != Op::loop) continue;
    first.clear();
    for (const Value v : n.operands) {
      int& least = first.emplace(same[static_cast<std::size_t>(v.node)], v.node).first->second;
      least = std::min(least, v.node);
    }
    for (const Value v : n.operands) {
      const auto at = static_cast<std::size_t>(v.node);
      to[at] = std::min(to[at], first.at(same[at]));
      any = any || to[at] != v.node;
    }
  }
  if (!any) return graph;
  return eliminate_dead(std::move(graph).kept(std::vector<bool>(to.size(), true), to));
}

}  // namespace logitless::ir

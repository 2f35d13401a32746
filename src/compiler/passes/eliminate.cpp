// eliminate-dead and eliminate-common.
#include "compiler/passes/eliminate.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <unordered_map>

#include "compiler/ir/text.h"

namespace logitless::ir {
namespace {

// The nodes for which keep(id) holds; operands go through `to`.
template <typename Replace>
Graph copied(const Graph& graph, const std::vector<bool>& keep, Replace&& replace) {
  Graph out;
  out.name = graph.name;
  out.reserve(graph.size());
  std::vector<int> to(static_cast<std::size_t>(graph.size()), -1);
  const auto value = [&](Value v) {
    return Value{to[static_cast<std::size_t>(replace(v.node))], v.index};
  };
  for (int id = 0; id < graph.size(); ++id) {
    if (!keep[static_cast<std::size_t>(id)]) continue;
    const Node& n = graph.node(id);
    std::vector<Value> operands;
    for (const Value v : n.operands) operands.push_back(value(v));
    to[static_cast<std::size_t>(id)] = out.copy(graph, id, std::move(operands)).node;
  }
  for (const Output& output : graph.outputs()) out.add_output(output.name, value(output.value));
  return out;
}

}  // namespace

Graph eliminate_dead(const Graph& graph) {
  std::vector<bool> live(static_cast<std::size_t>(graph.size()));
  for (const Output& output : graph.outputs())
    live[static_cast<std::size_t>(output.value.node)] = true;
  for (int id = graph.size() - 1; id >= 0; --id) {
    if (graph.node(id).op == Op::parameter) live[static_cast<std::size_t>(id)] = true;
    if (!live[static_cast<std::size_t>(id)]) continue;
    for (const Value v : graph.node(id).operands) live[static_cast<std::size_t>(v.node)] = true;
  }
  return copied(graph, live, [](int id) { return id; });
}

namespace {

// Of what is the same in equal nodes, a part.
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

// For each node the first that computes the same.
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
    // -0 and 0, and NaN, must not meet: bits, not values.
    const Head& head = a.head;
    for (const double number : {a.number, head.scale, head.softcap, a.scores.softcap})
      key.push_back(std::bit_cast<std::int64_t>(number));
    key.insert(key.end(), {head.bias, head.gradients, head.ignored.has_value(),
                           head.ignored.value_or(0), head.workspace});
    key.insert(key.end(),
               {a.epilogue.bias, a.epilogue.residual, a.epilogue.gelu, a.epilogue.gelu_gradient});
    key.insert(key.end(), {a.scores.causal, a.scores.window, a.scores.bias, a.scores.segments});
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
  std::unordered_multimap<std::size_t, int> seen;
  seen.reserve(static_cast<std::size_t>(graph.size()));
  std::vector<int> same(static_cast<std::size_t>(graph.size()));
  const auto firsts_of = [&](const Node& n) {
    std::vector<Value> operands;
    for (const Value v : n.operands)
      operands.push_back({same[static_cast<std::size_t>(v.node)], v.index});
    return operands;
  };
  for (int id = 0; id < graph.size(); ++id) {
    same[static_cast<std::size_t>(id)] = id;
    const Node& n = graph.node(id);
    if (n.op == Op::parameter || n.op == Op::loop) continue;
    const std::vector<Value> operands = firsts_of(n);
    const std::size_t hash = hash_of(n, operands);
    const auto [begin, end] = seen.equal_range(hash);
    const auto first = std::find_if(begin, end, [&](const auto& other) {
      return key_of(graph.node(other.second), firsts_of(graph.node(other.second))) ==
             key_of(n, operands);
    });
    if (first == end) {
      seen.emplace(hash, id);
    } else {
      same[static_cast<std::size_t>(id)] = first->second;
    }
  }
  return same;
}

}  // namespace

Graph eliminate_common(const Graph& graph) {
  const std::vector<int> same = first_equal(graph);
  std::vector<bool> keep(same.size());
  for (std::size_t id = 0; id < same.size(); ++id) keep[id] = same[id] == static_cast<int>(id);
  return eliminate_dead(
      copied(graph, keep, [&](int id) { return same[static_cast<std::size_t>(id)]; }));
}

Graph eliminate_common_of_loops(const Graph& graph) {
  const std::vector<int> same = first_equal(graph);
  std::vector<int> to(same.size());
  std::iota(to.begin(), to.end(), 0);
  bool any = false;
  for (const Node& n : graph.nodes()) {
    if (n.op != Op::loop) continue;
    std::map<int, int> first;  // of this loop's operands
    for (const Value v : n.operands) {
      const auto at = static_cast<std::size_t>(v.node);
      const auto [found, is_new] = first.emplace(same[at], v.node);
      if (!is_new) to[at] = std::min(to[at], found->second);
      any = any || to[at] != v.node;
    }
  }
  if (!any) return graph;
  const std::vector<bool> keep(same.size(), true);
  return eliminate_dead(
      copied(graph, keep, [&](int id) { return to[static_cast<std::size_t>(id)]; }));
}

}  // namespace logitless::ir

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

constexpr int kMostNodes = 32;  // that one transpose repeats

bool is_elementwise(Op op) { return op == Op::map || op == Op::cast; }

// The transpose of one value, in a new graph.
class Lifted {
 public:
  Lifted(const Graph& graph, const std::vector<int>& dims) : graph_(graph), dims_(dims) {
    place_.resize(dims.size());
    for (std::size_t i = 0; i < dims.size(); ++i)
      place_[static_cast<std::size_t>(dims[i])] = static_cast<int>(i);
  }

  // Returns whether all that the value is computed from can be made in the new order.
  bool can(Value v) {
    const Node& n = graph_.node(v);
    if (++nodes_ > kMostNodes) return false;
    if (is_elementwise(n.op))
      return std::all_of(n.operands.begin(), n.operands.end(), [&](Value o) { return can(o); });
    if (n.op == Op::broadcast) {
      const std::vector<int> to = dims_of(n);
      return std::is_sorted(to.begin(), to.end());
    }
    return n.op == Op::constant || n.op == Op::iota;
  }

  // Adds the value in the new order.
  Value add(Rewriter& to, Value v) {
    const auto [found, is_new] = made_.try_emplace(v);
    if (!is_new) return found->second;
    const Node& n = graph_.node(v);
    Attributes a = n.attributes;
    std::vector<Value> operands;
    if (is_elementwise(n.op)) {
      for (const Value o : n.operands) operands.push_back(add(to, o));
    } else {
      a.type.shape.clear();
      for (const int d : dims_)
        a.type.shape.push_back(n.results[0].shape[static_cast<std::size_t>(d)]);
      if (n.op == Op::iota) a.axis = place_[static_cast<std::size_t>(a.axis)];
      if (n.op == Op::broadcast) {
        a.dims = dims_of(n);
        operands.push_back(to(n.operands[0]));
      }
    }
    return made_[v] = to.out.add(n.op, std::move(operands), std::move(a), n.name);
  }

 private:
  const Graph& graph_;
  const std::vector<int>& dims_;
  std::vector<int> place_;  // by dimension: its place in the new order
  std::map<Value, Value> made_;
  int nodes_ = 0;

  std::vector<int> dims_of(const Node& broadcast) const {
    std::vector<int> to;
    for (const int d : broadcast.attributes->dims)
      to.push_back(place_[static_cast<std::size_t>(d)]);
    return to;
  }
};

}  // namespace

Graph lift_transposes(const Graph& graph) {
  Rewriter to(graph);
  return to.run([&](int id) -> Value {
    const Node& n = graph.node(id);
    if (n.op != Op::transpose || !is_elementwise(graph.node(n.operands[0]).op)) return {};
    Lifted lifted(graph, n.attributes->dims);
    return lifted.can(n.operands[0]) ? lifted.add(to, n.operands[0]) : Value{};
  });
}

}  // namespace logitless::ir

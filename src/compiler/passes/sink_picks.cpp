#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kLeastElements = 64;  // of the value for each that is picked
constexpr int kMostSteps = 32;               // that a pick computes again

bool is_step(const Node& n) {
  return row_of(n.op).work == Work::elementwise && (n.op == Op::map || n.op == Op::cast);
}

// Rewrites one pick.
class Sinker {
 public:
  Sinker(const Graph& graph, int pick, Rewriter& to)
      : g_(graph), pick_(graph.node(pick)), type_(pick_.results[0]), out_(to.out), to_(to) {}

  bool applies() const {
    const Value x = pick_.operands[0];
    int steps = 0;
    return is_step(g_.node(x)) && elements_of(g_.type(x)) >= kLeastElements * elements_of(type_) &&
           can_pick(x, steps);
  }

  Value run() {
    const Value index = to_(pick_.operands[1]);
    const Type of_index = out_.type(index);
    const std::int64_t size =
        sizes_of(g_.type(pick_.operands[0]))[static_cast<std::size_t>(pick_.attributes->axis)];
    const auto number = [&](std::int64_t n) {
      return constant(out_, static_cast<double>(n), of_index);
    };
    const Value inside = map(out_, Function::logical_and,
                             {map(out_, Function::ge, {index, number(0)}),
                              map(out_, Function::lt, {index, number(size)})});
    return map(out_, Function::select,
               {inside, picked(pick_.operands[0]), constant(out_, 0, type_)}, pick_.name);
  }

 private:
  const Graph& g_;
  const Node& pick_;
  const Type type_;  // of the result
  Graph& out_;
  const Rewriter& to_;
  std::map<Value, Value> done_;

  int axis() const { return pick_.attributes->axis; }
  Type typed(DType dtype) const {
    Type type = type_;
    type.dtype = dtype;
    return type;
  }

  bool can_pick(Value v, int& steps) const {
    const Node& n = g_.node(v);
    if (++steps > kMostSteps) return false;
    if (n.op == Op::broadcast)
      return std::find(n.attributes->dims.begin(), n.attributes->dims.end(), axis()) ==
             n.attributes->dims.end();
    if (!is_step(n)) return true;
    return std::all_of(n.operands.begin(), n.operands.end(),
                       [&](Value o) { return can_pick(o, steps); });
  }

  Value picked(Value v) {
    const auto known = done_.find(v);
    if (known != done_.end()) return known->second;
    return done_[v] = made(v);
  }
  Value made(Value v) {
    const Node& n = g_.node(v);
    const DType dtype = n.results[static_cast<std::size_t>(v.index)].dtype;
    if (n.op == Op::constant) return constant(out_, n.attributes->number, typed(dtype));
    if (n.op == Op::iota && n.attributes->axis == axis())
      return cast(out_, to_(pick_.operands[1]), dtype);
    if (n.op == Op::broadcast) {
      std::vector<int> dims = n.attributes->dims;
      const bool several = g_.type(pick_.operands[1]).rank() == g_.type(pick_.operands[0]).rank();
      for (int& d : dims) d -= !several && d > axis();
      return broadcast(out_, to_(n.operands[0]), type_.shape, dims);
    }
    if (!is_step(n)) {
      Attributes pick;
      pick.axis = axis();
      return out_.add(Op::pick, {to_(v), to_(pick_.operands[1])}, pick, pick_.name);
    }
    std::vector<Value> operands;
    for (const Value o : n.operands) operands.push_back(picked(o));
    return out_.add(n.op, std::move(operands), n.attributes, n.name);
  }
};

}  // namespace

Graph sink_picks(const Graph& graph) {
  Rewriter to(graph);
  return to.run([&](int id) -> Value {
    if (graph.node(id).op != Op::pick) return {};
    Sinker sinker(graph, id, to);
    return sinker.applies() ? sinker.run() : Value{};
  });
}

}  // namespace logitless::ir

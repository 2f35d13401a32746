#include <algorithm>
#include <optional>

#include "compiler/analysis/values.h"
#include "compiler/ir/build.h"
#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kSmall = 8;    // least ratio of its elements to those of its inputs
constexpr std::int64_t kLeast = 256;  // the largest value has at most so many times its elements
// Values read from memory, as for values that readers recompute.
constexpr int kMostMemory = 2;

bool is_elementwise(const Node& n) { return row_of(n.op).work == Work::elementwise; }
std::size_t at(int d) { return static_cast<std::size_t>(d); }

// Maps dimensions of a reshape's operand to those of its result if it only adds and removes
// dimensions of 1, which map to -1. Otherwise returns nothing.
std::optional<std::vector<int>> squeezed(const Shape& from, const Shape& to) {
  std::vector<int> dims(from.size(), -1);
  std::size_t j = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] == Dim(1)) continue;
    while (j < to.size() && to[j] == Dim(1)) ++j;
    if (j == to.size() || to[j] != from[i]) return std::nullopt;
    dims[i] = static_cast<int>(j++);
  }
  while (j < to.size() && to[j] == Dim(1)) ++j;
  return j == to.size() ? std::optional(dims) : std::nullopt;
}

class Spreader {
 public:
  explicit Spreader(const Graph& graph) : g_(graph), users_(graph.users()), to_(graph) {
    for (const Output& o : g_.outputs()) outputs_.push_back(o.value.node);
    for (const Node& n : g_.nodes()) largest_ = std::max(largest_, elements_of(n.results[0]));
  }

  Graph run() && {
    bool any = false;
    Graph out = to_.run([&](int id) -> Value {
      if (!is_mask(id)) return {};
      any = true;
      const Node& n = g_.node(id);
      elements_ = elements_of(g_.type(n.operands[0]));
      return spread(n.operands[0], n.results[0].shape, n.attributes->dims);
    });
    return any ? eliminate_common(std::move(out)) : g_;
  }

 private:
  const Graph& g_;
  const Lists<int> users_;
  std::vector<int> outputs_;
  std::int64_t largest_ = 0;
  std::int64_t elements_ = 0;  // of the value that is being spread
  Rewriter to_;

  bool is_mask(int id) const {
    const Node& n = g_.node(id);
    if (n.op != Op::broadcast || std::count(outputs_.begin(), outputs_.end(), id) > 0) return false;
    const Value v = n.operands[0];
    const std::int64_t elements = elements_of(g_.type(v));
    if (elements * kLeast < largest_ || elements == elements_of(n.results[0])) return false;
    if (!is_elementwise(g_.node(v))) return false;
    for (const int u : users_[at(id)]) {
      const Node& user = g_.node(u);
      const bool reduces = user.op == Op::reduce && user.attributes->reduce != Reduce::argmax;
      if (!is_elementwise(user) && !reduces) return false;
    }
    int steps = 0, memory = 0;
    return is_made(v, elements, steps, memory) && steps <= kCheapSteps && memory <= kMostMemory;
  }

  // Returns whether the value is computed in few steps from values that are small beside
  // `elements`.
  bool is_made(Value v, std::int64_t elements, int& steps, int& memory) const {
    const Node& n = g_.node(v);
    if (n.op == Op::constant || n.op == Op::iota) {
      ++steps;
      return true;
    }
    if (elements_of(g_.type(v)) * kSmall <= elements) {
      ++steps;
      return ++memory <= kMostMemory;
    }
    if (n.op == Op::broadcast) return is_made(n.operands[0], elements, steps, memory);
    if (n.op == Op::reshape)
      return squeezed(g_.type(n.operands[0]).shape, n.results[0].shape).has_value() &&
             is_made(n.operands[0], elements, steps, memory);
    if ((n.op != Op::map && n.op != Op::cast) || is_costly(n) || ++steps > kCheapSteps)
      return false;
    return std::all_of(n.operands.begin(), n.operands.end(),
                       [&](Value o) { return is_made(o, elements, steps, memory); });
  }

  // Returns the value in `shape`, where its dimension i is dims[i]; -1: it has size 1 and is
  // dropped.
  Value spread(Value v, const Shape& shape, const std::vector<int>& dims) {
    const Node& n = g_.node(v);
    const Type type{g_.type(v).dtype, shape};
    if (n.op == Op::constant) {
      Attributes a = n.attributes;
      a.type = type;
      return to_.out.add(Op::constant, {}, std::move(a));
    }
    if (n.op == Op::iota) {
      const int axis = dims[at(n.attributes->axis)];
      return axis < 0 ? constant(to_.out, 0.0, type) : iota(to_.out, type, axis);
    }
    if (elements_of(g_.type(v)) * kSmall <= elements_) return placed(v, shape, dims);
    if (n.op == Op::broadcast) {
      std::vector<int> through;
      for (const int d : n.attributes->dims) through.push_back(dims[at(d)]);
      return spread(n.operands[0], shape, through);
    }
    if (n.op == Op::reshape) {
      const auto to = squeezed(g_.type(n.operands[0]).shape, n.results[0].shape);
      if (to) {
        std::vector<int> through;
        for (const int d : *to) through.push_back(d < 0 ? -1 : dims[at(d)]);
        return spread(n.operands[0], shape, through);
      }
    }
    std::vector<Value> operands;
    for (const Value o : n.operands) operands.push_back(spread(o, shape, dims));
    return to_.out.copy(g_, v.node, std::move(operands));
  }

  // Places a small value itself.
  Value placed(Value v, const Shape& shape, const std::vector<int>& dims) {
    Shape kept;
    std::vector<int> to;
    for (std::size_t d = 0; d < dims.size(); ++d) {
      if (dims[d] < 0) continue;
      kept.push_back(g_.type(v).shape[d]);
      to.push_back(dims[d]);
    }
    return broadcast(to_.out, reshape(to_.out, to_(v), std::move(kept)), shape, std::move(to));
  }
};

}  // namespace

Graph spread_masks(const Graph& graph) { return Spreader(graph).run(); }

}  // namespace logitless::ir

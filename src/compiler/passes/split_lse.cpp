#include <utility>
#include <vector>

#include "compiler/ir/build.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

class Splitter {
 public:
  Splitter(const Graph& graph, bool rows)
      : g_(graph),
        rows_(rows),
        carries_(static_cast<std::size_t>(graph.size())),
        wanted_(carries_.size()),
        to_(carries_.size()),
        low_(carries_.size()) {}

  Graph run() && {
    bool any = false;
    for (int id = 0; id < g_.size(); ++id) {
      carries_[at(id)] = is_lse(id) || passes_on(id);
      if (!is_difference(id)) continue;
      any = true;
      for (const Value v : g_.node(id).operands) want(v);
    }
    if (!any) return g_;
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) emit(id);
    for (const Output& o : g_.outputs()) out_.add_output(o.name, written(o.value));
    return std::move(out_);
  }

 private:
  const Graph& g_;
  const bool rows_;            // differences of rows alone, in f64
  std::vector<bool> carries_;  // a log-sum-exp, or a view or choice of some
  std::vector<bool> wanted_;   // its low part is read
  Graph out_;
  std::vector<Value> to_, low_;  // low_: with rows_, all of it in f64

  static std::size_t at(int id) { return static_cast<std::size_t>(id); }
  bool carries(Value v) const { return carries_[at(v.node)]; }
  bool is_lse(int id) const {
    const Node& n = g_.node(id);
    return is_reduce(n, Reduce::lse) && n.results[0].dtype == DType::f32;
  }
  // Returns true for a view or choice, which is as exact as its log-sum-exps.
  bool passes_on(int id) const {
    const Node& n = g_.node(id);
    if (n.op == Op::broadcast) return !rows_ && carries(n.operands[0]);
    if (n.op == Op::reshape || n.op == Op::transpose || n.op == Op::slice ||
        is_map(n, Function::neg))
      return carries(n.operands[0]);
    return is_map(n, Function::select) && (carries(n.operands[1]) || carries(n.operands[2]));
  }
  // x - lse, lse - x or -x + lse.
  bool is_difference(int id) const {
    const Node& n = g_.node(id);
    if (!is_map(n, Function::sub) && !is_map(n, Function::add)) return false;
    const Value a = n.operands[0], b = n.operands[1];
    if (!carries(a) && !carries(b)) return false;
    return is_map(n, Function::sub) || is_map(g_.node(a), Function::neg) ||
           is_map(g_.node(b), Function::neg);
  }
  void want(Value v) {
    if (!carries(v) || wanted_[at(v.node)]) return;
    wanted_[at(v.node)] = true;
    for (const Value o : g_.node(v).operands) want(o);
  }

  Value written(Value v) const {
    const Value first = to_[at(v.node)];
    return {first.node, first.index + v.index};
  }
  std::vector<Value> written(const std::vector<Value>& values) const {
    std::vector<Value> list;
    for (const Value v : values) list.push_back(written(v));
    return list;
  }
  bool split(Value v) const { return wanted_[at(v.node)]; }

  void emit(int id) {
    const Node& n = g_.node(id);
    if (split({id, 0})) {
      is_lse(id) ? emit_lse(id) : emit_shown(id);
      return;
    }
    if (rows_ && is_difference(id)) {
      const Value whole = out_.add(n.op, wide(n.operands), n.attributes, n.name);
      to_[at(id)] = cast(out_, whole, DType::f32);
      return;
    }
    to_[at(id)] = out_.copy(g_, id, written(n.operands));
    if (!is_difference(id)) return;
    const auto correct = [&](Value v, Function by) {
      if (!split(v)) return;
      Attributes a = n.attributes;
      a.function = by;
      to_[at(id)] = out_.add(Op::map, {to_[at(id)], low_[at(v.node)]}, std::move(a), n.name);
    };
    correct(n.operands[0], Function::add);
    correct(n.operands[1], n.attributes->function);
  }

  std::vector<Value> wide(const std::vector<Value>& values) {
    std::vector<Value> list;
    for (const Value v : values)
      list.push_back(split(v) ? low_[at(v.node)] : cast(out_, written(v), DType::f64));
    return list;
  }

  void emit_lse(int id) {
    const Node& n = g_.node(id);
    Attributes a = n.attributes;
    a.type.dtype = DType::f64;
    const Value whole = out_.add(n.op, written(n.operands), std::move(a), n.name);
    const Value high = cast(out_, whole, DType::f32);
    to_[at(id)] = high;
    low_[at(id)] = whole;
    if (rows_) return;
    const Value rounded = cast(out_, high, DType::f64);
    // An infinity has no rest.
    const Value rest =
        map(out_, Function::select,
            {map(out_, Function::eq, {whole, rounded}), constant(out_, 0.0, out_.type(whole)),
             map(out_, Function::sub, {whole, rounded})});
    low_[at(id)] = cast(out_, rest, DType::f32);
  }

  // The view or choice of the low parts beside that of the high ones.
  void emit_shown(int id) {
    const Node& n = g_.node(id);
    to_[at(id)] = out_.copy(g_, id, written(n.operands));
    std::vector<Value> low;
    const bool choice = is_map(n, Function::select);
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      const Value v = n.operands[i];
      if (choice && i == 0) {
        low.push_back(written(v));
      } else if (rows_) {
        low.push_back(wide({v})[0]);
      } else {
        low.push_back(split(v) ? low_[at(v.node)] : constant(out_, 0.0, g_.type(v)));
      }
    }
    low_[at(id)] = out_.add(n.op, std::move(low), n.attributes);
  }
};

}  // namespace

Graph split_lse(const Graph& graph) { return Splitter(graph, false).run(); }
Graph widen_lse(const Graph& graph) { return Splitter(graph, true).run(); }

}  // namespace logitless::ir

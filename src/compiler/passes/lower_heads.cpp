#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/passes/find_heads.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

// The target of rows that a condition leaves out: no index that a program means.
constexpr std::int64_t kNoTarget = std::numeric_limits<std::int32_t>::min();

// One head to be lowered. `forward` replaces lse and pick. The gradients, if any, come from the
// same operation or from a second one.
struct Lowered {
  FoundHead found;
  HeadGradients gradients;
  Head head;
  IgnoredRows ignored;   // where head.ignored is set
  bool together = true;  // one operation: the cotangents do not depend on lse and pick
};

class Writer {
  static constexpr int kLogProb = 2;  // of a head's results

 public:
  Writer(const Graph& graph, const Lowered& head)
      : g_(graph), h_(head), to_(static_cast<std::size_t>(graph.size())) {
    log_prob_ = head.found.pick_log_prob;
    for (int id = 0; id < graph.size(); ++id) log_prob_ = log_prob_ || lse_sign(id) != 0;
  }

  Graph run() {
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) emit(id);
    for (const Output& o : g_.outputs()) out_.add_output(o.name, value(o.value));
    return eliminate_dead(std::move(out_));
  }

 private:
  const Graph& g_;
  const Lowered& h_;
  Graph out_;
  std::vector<Value> to_;
  Value forward_, backward_;  // first results of the operations
  bool log_prob_ = false;     // the forward operation has a log-probability

  Value value(Value v) const {
    const Value first = to_[static_cast<std::size_t>(v.node)];
    return {first.node, first.index + v.index};
  }
  Value needed(Value v) {
    emit(v.node);
    return value(v);
  }

  void emit(int id) {
    Value& to = to_[static_cast<std::size_t>(id)];
    if (to.valid()) return;
    const FoundHead& f = h_.found;
    if (id == f.lse) {
      to = forward();
    } else if (id == f.pick) {
      to = {forward().node, f.pick_log_prob ? kLogProb : 1};
    } else if (lse_sign(id) != 0) {
      to = difference(id);
    } else if (id == h_.gradients.d_x) {
      to = gradient(0);
    } else if (id == h_.gradients.d_w) {
      to = gradient(1);
    } else if (id == h_.gradients.d_bias) {
      to = gradient(2);
    } else {
      std::vector<Value> operands;
      for (const Value v : g_.node(id).operands) operands.push_back(needed(v));
      Value made = out_.copy(g_, id, std::move(operands));
      const std::vector<int>& products = h_.ignored.products;
      if (std::find(products.begin(), products.end(), id) != products.end()) {
        const Type type = out_.type(made);
        made = counted(made, constant(out_, 0.0, type), type.shape);
      }
      to_[static_cast<std::size_t>(id)] = made;
    }
  }

  // Returns the sign of lse in lse - pick or pick - lse, written with sub or as a sum with a neg.
  // The engine rounds this difference once. Returns 0 if the node is neither.
  int lse_sign(int id) const {
    const FoundHead& f = h_.found;
    const bool minus = is_map(g_.node(id), Function::sub);
    if (f.pick_log_prob || !(minus || is_map(g_.node(id), Function::add))) return 0;
    int of_lse = 0, of_pick = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      int operand = g_.node(id).operands[i].node, sign = minus && i == 1 ? -1 : 1;
      if (is_map(g_.node(operand), Function::neg)) {
        operand = g_.node(operand).operands[0].node;
        sign = -sign;
      }
      if (operand == f.lse) of_lse = sign;
      if (operand == f.pick) of_pick = sign;
    }
    return of_lse + of_pick == 0 ? of_lse : 0;
  }
  Value difference(int id) {
    const bool negative = lse_sign(id) > 0;
    const Value lse = forward(), p{lse.node, kLogProb};
    // Outside [0, V) the logit is 0, so the difference is 0 - lse.
    return select_inside(negative ? map(out_, Function::neg, {p}) : p,
                         negative ? lse : map(out_, Function::neg, {lse}));
  }

  // Returns x where the target has a logit, else 0.
  Value where_inside(Value x) { return select_inside(x, constant(out_, 0.0, out_.type(x))); }
  Value select_inside(Value x, Value other) {
    const Value targets = needed(h_.found.targets);
    const Type type = out_.type(targets);
    const auto vocab = static_cast<double>(sizes_of(g_.type(h_.found.w))[0]);
    const Value inside = map(out_, Function::logical_and,
                             {map(out_, Function::ge, {targets, constant(out_, 0.0, type)}),
                              map(out_, Function::lt, {targets, constant(out_, vocab, type)})});
    return map(out_, Function::select, {inside, x, other});
  }

  Value forward() {
    if (!forward_.valid()) forward_ = call(h_.together && h_.head.gradients, log_prob_);
    return forward_;
  }
  Value gradient(int which) {
    if (!backward_.valid()) backward_ = h_.together ? forward() : call(true, false);
    int index = out_.node(backward_).attributes->head.first_gradient();
    if (which > 0 && h_.head.d_x != DType::i8) ++index;
    if (which > 1 && h_.head.d_w != DType::i8) ++index;
    return {backward_.node, index};
  }
  Value spread(const Cotangent& c) {
    const Type& type = g_.node(h_.found.lse).results[0];
    if (!c.value.valid()) return constant(out_, 0.0, type);
    return broadcast(out_, needed(c.value), type.shape, c.dims);
  }

  // Returns the targets, kNoTarget where a row does not count.
  Value targets() {
    const Value given = needed(h_.found.targets);
    if (!h_.head.ignored || h_.ignored.target) return given;
    const Type type = out_.type(given);
    return counted(given, constant(out_, static_cast<double>(kNoTarget), type), type.shape);
  }
  // Returns x in the rows that count, and the other in those that do not.
  Value counted(Value x, Value other, const Shape& shape) {
    Value counts = reshape(out_, needed(h_.ignored.counts), shape);
    if (const Type type = out_.type(counts); type.dtype != DType::i8)
      counts = map(out_, Function::ne, {counts, constant(out_, 0.0, type)});
    if (h_.ignored.negated) std::swap(x, other);
    return map(out_, Function::select, {counts, x, other});
  }

  Value call(bool gradients, bool log_prob) {
    const FoundHead& f = h_.found;
    Attributes a;
    a.head = h_.head;
    a.head.log_prob = log_prob;
    std::vector<Value> operands = {needed(f.x), needed(f.w), targets()};
    if (f.bias.valid()) operands.push_back(needed(f.bias));
    if (gradients) {
      Value d_lse = spread(h_.gradients.d_lse);
      const Value d_pick = spread(h_.gradients.d_pick);
      // log p = logit - lse where the target has a logit.
      if (f.pick_log_prob && h_.gradients.d_pick.value.valid())
        d_lse = map(out_, Function::sub, {d_lse, where_inside(d_pick)});
      operands.push_back(d_lse);
      operands.push_back(d_pick);
    } else {
      a.head.gradients = false;
      a.head.d_x = a.head.d_w = a.head.d_bias = DType::i8;
    }
    a.location = g_.node(f.z).attributes->location;
    return out_.add(Op::head, std::move(operands), std::move(a),
                    g_.node(f.z).name.empty() ? "head" : g_.node(f.z).name + ".head");
  }
};

class HeadLowering {
 public:
  HeadLowering(const Graph& graph, const Lists<int>& users, std::int64_t workspace)
      : g_(graph), users_(users), workspace_(workspace) {}

  // Returns the graph with the head around this dot as one operation, if it is a head.
  std::optional<Graph> at(int dot) const {
    const std::optional<FoundHead> found = find_head(g_, users_, dot);
    if (!found) return std::nullopt;
    // Labels that the logits decide, as of self-training, are not known before the operation runs.
    if (depends(found->targets, *found)) return std::nullopt;
    Lowered h = described(*found);
    const HeadGradients& to = h.gradients;
    h.together =
        !to.any() || (!depends(to.d_lse.value, *found) && !depends(to.d_pick.value, *found));
    std::optional<IgnoredRows> rows = ignored_rows(g_, users_, *found, to);
    if (rows && !depends(rows->counts, *found)) {
      h.head.ignored = rows->target.value_or(kNoTarget);
      h.ignored = *std::move(rows);
    }
    if (h.head.bias && g_.type(found->bias).dtype != DType::f32 &&
        g_.type(found->bias).dtype != g_.type(found->x).dtype)
      return std::nullopt;
    // Gives up if the logits have other readers: they are needed anyway.
    Graph out = Writer(g_, h).run();
    if (count(out, Op::dot) + products(h) > count(g_, Op::dot)) return std::nullopt;
    return out;
  }

 private:
  const Graph& g_;
  const Lists<int>& users_;
  const std::int64_t workspace_;

  Lowered described(const FoundHead& found) const {
    Lowered h;
    h.found = found;
    h.head.bias = found.bias.valid();
    h.head.scale = found.scale;
    h.head.softcap = found.softcap;
    h.gradients = find_head_gradients(g_, found);
    h.head.gradients = h.gradients.any();
    const auto dtype = [&](int node) {
      return node < 0 ? DType::i8 : g_.node(node).results[0].dtype;
    };
    h.head.d_x = dtype(h.gradients.d_x);
    h.head.d_w = dtype(h.gradients.d_w);
    h.head.d_bias = dtype(h.gradients.d_bias);
    h.head.workspace = workspace_;
    return h;
  }
  // Returns the number of matrix products that the operation replaces.
  static int products(const Lowered& h) {
    return 1 + (h.gradients.d_x >= 0 ? 1 : 0) + (h.gradients.d_w >= 0 ? 1 : 0);
  }
  static int count(const Graph& graph, Op op) {
    return static_cast<int>(std::count_if(graph.nodes().begin(), graph.nodes().end(),
                                          [&](const Node& n) { return n.op == op; }));
  }
  bool depends(Value v, const FoundHead& f) const {
    if (!v.valid()) return false;
    std::set<int> seen;
    std::vector<int> work = {v.node};
    while (!work.empty()) {
      const int id = work.back();
      work.pop_back();
      if (!seen.insert(id).second) continue;
      if (id == f.lse || id == f.pick) return true;
      for (const Value o : g_.node(id).operands) work.push_back(o.node);
    }
    return false;
  }
};

}  // namespace

Graph lower_heads(const Graph& graph, std::int64_t workspace, std::int64_t least_logits) {
  Graph current = graph;
  Lists<int> users = current.users();
  for (int id = 0; id < current.size(); ++id) {
    if (current.node(id).op != Op::dot || bytes_of(current.node(id).results[0]) < least_logits)
      continue;
    if (std::optional<Graph> lowered = HeadLowering(current, users, workspace).at(id)) {
      current = std::move(*lowered);
      users = current.users();
      id = -1;  // start again: node ids have changed
    }
  }
  return current;
}

Graph limit_heads(const Graph& graph, std::int64_t workspace) {
  Rewriter to(graph);
  return to.run([&](int id) -> Value {
    if (graph.node(id).op != Op::head) return {};
    Attributes a = graph.node(id).attributes;
    a.head.workspace = workspace;
    return to.with(id, std::move(a));
  });
}

}  // namespace logitless::ir

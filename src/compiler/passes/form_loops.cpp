#include "compiler/passes/form_loops.h"

#include <algorithm>
#include <map>
#include <queue>
#include <set>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/ir/build.h"
#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

// Phases that recompute earlier ones make programs whose length grows with the square of their
// number. Bounds: each node so many times, if there are more than a few nodes.
constexpr std::size_t kMostTimes = 4, kFewNodes = 1500;

class LoopFormer {
 public:
  LoopFormer(const Graph& graph, std::span<const LoopCut> cuts, std::string group)
      : g_(graph),
        group_(std::move(group)),
        users_(graph.users()),
        cut_of_(static_cast<std::size_t>(graph.size()), -1) {
    for (std::size_t c = 0; c < cuts.size(); ++c) {
      const Region& r = cuts[c].region;
      check(!r.nodes.empty() && r.extent > 0, "form_loops: an empty region");
      for (const auto& [node, how] : r.nodes) {
        int& cut = cut_of_[static_cast<std::size_t>(node)];
        check(cut < 0, "form_loops: a node of two regions");
        cut = static_cast<int>(c);
      }
      first_loop_.push_back(static_cast<int>(loops_.size()));
      const std::int64_t chunk = std::clamp<std::int64_t>(cuts[c].chunk, 1, r.extent);
      const std::string& own = cuts[c].group.empty() ? group_ : cuts[c].group;
      for (int k = 0; k < r.phases; ++k) loops_.push_back({r, k, chunk, own});
    }
    for (const Node& n : g_.nodes()) {
      first_value_.push_back(values_);
      values_ += n.results.size();
    }
    leaves_.resize(values_);
    for (const Output& output : g_.outputs()) leaves_[number(output.value)] = true;
  }

  // Returns nothing if loops wait for each other, or are too long.
  std::optional<Graph> run() {
    std::size_t once = 0, nodes = 0;
    for (const LoopPlan& loop : loops_) {
      if (loop.phase == 0) once += loop.region.nodes.size();
    }
    const std::size_t most = std::max(kMostTimes * once, kFewNodes);
    for (auto loop = loops_.rbegin(); loop != loops_.rend(); ++loop) {
      demand(*loop);
      nodes += loop->body.size();
      if (nodes > most) return std::nullopt;
    }
    const std::optional<std::vector<int>> units = order();
    if (!units) return std::nullopt;
    emit(*units);
    return std::move(out_);
  }

 private:
  using Read = std::pair<Value, Need>;
  struct LoopPlan {
    const Region& region;
    int phase = 0;
    std::int64_t chunk = 1;
    std::string group;
    std::vector<int> body = {};       // nodes of the graph that the body computes, in order
    std::vector<Value> results = {};  // values that leave the loop
    std::vector<Read> inputs = {};    // values that enter the loop, and the parts read
    int first = 0;                    // its position in the order of nodes
  };

  const Graph& g_;
  const std::string group_;
  const Lists<int> users_;
  std::vector<int> cut_of_;               // by node; -1: outside
  std::vector<int> first_loop_;           // by cut
  std::vector<std::size_t> first_value_;  // by node: index of its first value
  std::size_t values_ = 0;
  std::vector<LoopPlan> loops_;
  std::vector<bool> leaves_;  // by value: it is a result, or later phases read it
  Graph out_;
  std::vector<Value> mapped_;  // by value
  std::set<int> rounded_;      // casts of loops' sums to the dtypes of their values
  std::vector<std::pair<const LoopPlan*, std::shared_ptr<const Loop>>> bodies_;

  std::size_t number(Value v) const {
    return first_value_[static_cast<std::size_t>(v.node)] + static_cast<std::size_t>(v.index);
  }
  bool inside(int node) const { return cut_of_[static_cast<std::size_t>(node)] >= 0; }
  // Returns the loop that makes the results of an inside node.
  int loop_of(int node) const {
    const auto first = static_cast<std::size_t>(cut_of_[static_cast<std::size_t>(node)]);
    const int loop = first_loop_[first];
    return loop +
           loops_[static_cast<std::size_t>(loop)].region.phase[static_cast<std::size_t>(node)];
  }
  static int phase(const Region& r, int node) { return r.phase[static_cast<std::size_t>(node)]; }
  bool big(const Region& r, Value v) const {
    return is_big(elements_of(g_.type(v)), elements_of(g_.type(r.seed)));
  }

  // Returns whether a value leaves the loop of its own phase.
  bool leaves(const Region& r, Value v) const {
    if (leaves_[number(v)]) return true;
    for (const int u : users_[static_cast<std::size_t>(v.node)]) {
      const Node& n = g_.node(u);
      for (std::size_t i = 0; i < n.operands.size(); ++i) {
        if (n.operands[i] == v && !(r.inside(u) && flows(r, g_, u, i))) return true;
      }
    }
    return false;
  }

  // Returns whether a loop computes operand i of a node of its body itself, for the first time or
  // again.
  bool computed(const LoopPlan& loop, int node, std::size_t i) const {
    const Value v = g_.node(node).operands[i];
    return flows(loop.region, g_, node, i) &&
           (phase(loop.region, v.node) == loop.phase || big(loop.region, v));
  }
  // Returns whether the body makes the operand, which has no operands itself.
  bool made(Value v, const Need& need) const {
    return row_of(g_.node(v).op).of_nothing &&
           (need.whole || chunked_by_result(g_, v.node, need.split).has_value());
  }
  static Need normal(const Need& need) { return need.whole ? Need{} : need; }

  // Decides the body of a loop. Runs from the last phase to the first, since phases demand values
  // of earlier ones.
  void demand(LoopPlan& loop) {
    const Region& r = loop.region;
    std::vector<int> work;
    std::set<Read> reads;
    std::vector<bool> taken(static_cast<std::size_t>(g_.size()));
    const auto take = [&](int node) {
      const auto at = static_cast<std::size_t>(node);
      if (taken[at]) return;
      taken[at] = true;
      loop.body.push_back(node);
      work.push_back(node);
    };
    for (const auto& [node, how] : r.nodes) {
      if (phase(r, node) != loop.phase) continue;
      for (std::size_t i = 0; i < g_.node(node).results.size(); ++i) {
        const Value v{node, static_cast<std::int32_t>(i)};
        if (!leaves(r, v)) continue;
        loop.results.push_back(v);
        take(node);
      }
    }
    loop.first = g_.size();
    while (!work.empty()) {
      const int node = work.back();
      work.pop_back();
      if (phase(r, node) == loop.phase) loop.first = std::min(loop.first, node);
      const Chunked& how = r.nodes.at(node);
      for (std::size_t i = 0; i < how.needs.size(); ++i) {
        const Value v = g_.node(node).operands[i];
        if (computed(loop, node, i)) {
          take(v.node);
          continue;
        }
        if (made(v, how.needs[i])) continue;
        // The loop of an earlier phase stores it.
        if (flows(r, g_, node, i)) leaves_[number(v)] = true;
        const Read read{v, normal(how.needs[i])};
        if (reads.insert(read).second) loop.inputs.push_back(read);
      }
    }
    std::sort(loop.body.begin(), loop.body.end());
  }

  // --- the new graph: outside nodes and loops, in the old order as far as loops allow. Returns
  // nothing if loops wait for each other. Loops are numbered after the nodes.
  std::optional<std::vector<int>> order() const {
    const int loops = static_cast<int>(loops_.size());
    const int units = g_.size() + loops;
    std::vector<int> waiting(static_cast<std::size_t>(units), 0);
    const auto each_read = [&](auto&& depends) {  // depends(unit, value)
      for (int id = 0; id < g_.size(); ++id) {
        if (inside(id)) continue;
        for (const Value v : g_.node(id).operands) depends(id, v);
      }
      for (int k = 0; k < loops; ++k) {
        for (const auto& [v, need] : loops_[static_cast<std::size_t>(k)].inputs)
          depends(g_.size() + k, v);
      }
    };
    const Lists<int> after = Lists<int>::grouped(static_cast<std::size_t>(units), [&](auto&& put) {
      each_read([&](int unit, Value v) {
        const int maker = inside(v.node) ? g_.size() + loop_of(v.node) : v.node;
        put(static_cast<std::size_t>(maker), unit);
      });
    });
    each_read([&](int unit, Value) { ++waiting[static_cast<std::size_t>(unit)]; });
    const auto exists = [&](int unit) {
      return unit < g_.size() ? !inside(unit)
                              : !loops_[static_cast<std::size_t>(unit - g_.size())].body.empty();
    };
    const auto place = [&](int unit) {
      return unit < g_.size() ? unit : loops_[static_cast<std::size_t>(unit - g_.size())].first;
    };
    std::priority_queue<std::pair<int, int>, std::vector<std::pair<int, int>>, std::greater<>>
        ready;
    std::size_t count = 0;
    for (int unit = 0; unit < units; ++unit) {
      if (!exists(unit)) continue;
      ++count;
      if (waiting[static_cast<std::size_t>(unit)] == 0) ready.emplace(place(unit), unit);
    }
    std::vector<int> order;
    while (!ready.empty()) {
      const int unit = ready.top().second;
      ready.pop();
      order.push_back(unit);
      for (const int next : after[static_cast<std::size_t>(unit)]) {
        if (--waiting[static_cast<std::size_t>(next)] == 0) ready.emplace(place(next), next);
      }
    }
    if (order.size() != count) return std::nullopt;
    return order;
  }

  void emit(const std::vector<int>& order) {
    out_.name = g_.name;
    out_.reserve(g_.size());
    mapped_.resize(values_);
    for (const int unit : order) {
      if (unit < g_.size()) {
        copy(unit);
      } else {
        emit_loop(loops_[static_cast<std::size_t>(unit - g_.size())]);
      }
    }
    for (const Output& output : g_.outputs()) out_.add_output(output.name, mapped(output.value));
  }
  Value mapped(Value v) const { return mapped_[number(v)]; }

  // Returns the fp32 sum of a loop of which v is the rounded result, if the sum has this dtype.
  // Casts of the program itself round.
  Value unrounded(Value v, DType dtype) const {
    if (!rounded_.contains(v.node)) return {};
    const Value sum = out_.node(v).operands[0];
    return out_.type(sum).dtype == dtype ? sum : Value{};
  }

  void copy(int id) {
    const Node& n = g_.node(id);
    if (n.op == Op::cast) {
      const Value sum = unrounded(mapped(n.operands[0]), n.results[0].dtype);
      if (sum.valid()) {
        mapped_[number({id, 0})] = sum;
        return;
      }
    }
    std::vector<Value> operands;
    for (const Value v : n.operands) operands.push_back(mapped(v));
    const Value first = out_.copy(g_, id, std::move(operands));
    for (std::size_t i = 0; i < n.results.size(); ++i)
      mapped_[number({id, static_cast<std::int32_t>(i)})] = {first.node,
                                                             static_cast<std::int32_t>(i)};
  }

  void emit_loop(const LoopPlan& plan) {
    const Region& r = plan.region;
    Attributes attributes;
    attributes.loop = body_for(plan);
    const Loop& loop = *attributes.loop;
    std::vector<Value> operands;
    for (const auto& [v, need] : plan.inputs) {
      Value outer = mapped(v);
      if (!need.whole) {
        const Shape shape =
            collapse(loop, need.split).shape(g_.type(v).shape, Dim(r.extent * need.split.factor));
        outer = reshape(out_, outer, shape);
      }
      operands.push_back(outer);
    }
    const Value made = out_.add(Op::loop, std::move(operands), std::move(attributes),
                                g_.node(plan.results[0]).name);
    for (std::size_t i = 0; i < plan.results.size(); ++i) {
      const Value v = plan.results[i];
      const Value whole{made.node, static_cast<std::int32_t>(i)};
      const Value sum = reshape(out_, whole, g_.type(v).shape);
      const Value result = cast(out_, sum, g_.type(v).dtype);
      if (result.node != sum.node) rounded_.insert(result.node);
      mapped_[number(v)] = result;
    }
  }

  // Returns the body of an equal loop, if there is one. Layers of a network share a body, which has
  // the names of the first one.
  std::shared_ptr<const Loop> body_for(const LoopPlan& plan) {
    for (const auto& [other, loop] : bodies_) {
      if (alike(*other, plan)) return loop;
    }
    bodies_.emplace_back(&plan, emit_body(plan));
    return bodies_.back().second;
  }

  // Returns whether two loops have the same nodes in the same order and read the same inputs. Names
  // and locations may differ.
  bool alike(const LoopPlan& a, const LoopPlan& b) const {
    const Region &ra = a.region, &rb = b.region;
    if (ra.extent != rb.extent || a.chunk != b.chunk || a.group != b.group ||
        a.body.size() != b.body.size() || a.inputs.size() != b.inputs.size() ||
        a.results.size() != b.results.size() || g_.type(ra.seed) != g_.type(rb.seed) ||
        *ra.split(ra.seed) != *rb.split(rb.seed))
      return false;
    for (std::size_t i = 0; i < a.inputs.size(); ++i) {
      const auto& [va, need_a] = a.inputs[i];
      const auto& [vb, need_b] = b.inputs[i];
      if (need_a != need_b || g_.type(va) != g_.type(vb)) return false;
    }
    const auto input = [](const LoopPlan& loop, const Read& read) {
      return std::find(loop.inputs.begin(), loop.inputs.end(), read) - loop.inputs.begin();
    };
    const auto place = [](const LoopPlan& loop, int node) {
      return std::lower_bound(loop.body.begin(), loop.body.end(), node) - loop.body.begin();
    };
    for (std::size_t n = 0; n < a.body.size(); ++n) {
      const int x = a.body[n], y = b.body[n];
      const Chunked &how_a = ra.nodes.at(x), &how_b = rb.nodes.at(y);
      if (!computes_alike(g_.node(x), g_.node(y)) || how_a != how_b) return false;
      for (std::size_t i = 0; i < g_.node(x).operands.size(); ++i) {
        const Value va = g_.node(x).operands[i], vb = g_.node(y).operands[i];
        const Read read_a{va, normal(how_a.needs[i])};
        const Read read_b{vb, normal(how_b.needs[i])};
        const bool inner_a = computed(a, x, i), made_a = !inner_a && made(va, read_a.second);
        const bool inner_b = computed(b, y, i), made_b = !inner_b && made(vb, read_b.second);
        if (va.index != vb.index || inner_a != inner_b || made_a != made_b) return false;
        const bool same = inner_a  ? place(a, va.node) == place(b, vb.node)
                          : made_a ? computes_alike(g_.node(va), g_.node(vb))
                                   : input(a, read_a) == input(b, read_b);
        if (!same) return false;
      }
    }
    for (std::size_t i = 0; i < a.results.size(); ++i) {
      const Value va = a.results[i], vb = b.results[i];
      if (va.index != vb.index || place(a, va.node) != place(b, vb.node)) return false;
    }
    return true;
  }

  std::shared_ptr<const Loop> emit_body(const LoopPlan& plan) {
    const Region& r = plan.region;
    auto loop = std::make_shared<Loop>();
    loop->symbol = bodies_.empty() ? plan.group : concat(plan.group, "_", bodies_.size());
    loop->extent = r.extent;
    loop->chunk = plan.chunk;
    Graph& body = loop->body;
    body.name = loop->symbol;
    const auto parameter = [&](const std::string& name, Type type) {
      Attributes a;
      a.name = name;
      a.type = std::move(type);
      return body.add(Op::parameter, {}, std::move(a));
    };
    const Value first = parameter("first", {DType::i64, {}});
    std::map<Read, Value> entered;
    std::map<Value, Value> inner;
    for (const Read& read : plan.inputs) {
      const auto& [v, need] = read;
      Type type = g_.type(v);
      Loop::Input input;
      if (!need.whole) {
        type.shape = collapse(*loop, need.split).shape(type.shape);
        input = {Loop::In::slice, need.split.dim, need.split.factor};
      }
      entered[read] = parameter(concat("in", loop->inputs.size()), std::move(type));
      loop->inputs.push_back(input);
    }
    for (const int id : plan.body) {
      std::vector<Value> reads;
      for (std::size_t i = 0; i < g_.node(id).operands.size(); ++i) {
        const Value v = g_.node(id).operands[i];
        const Read read{v, normal(r.nodes.at(id).needs[i])};
        if (computed(plan, id, i)) {
          reads.push_back(inner.at(v));
        } else if (made(v, read.second)) {
          const auto found = entered.find(read);
          reads.push_back(found != entered.end() ? found->second
                                                 : entered[read] = make(*loop, r, read, first));
        } else {
          reads.push_back(entered.at(read));
        }
      }
      const Value made_value = clone(*loop, r, id, r.nodes.at(id), std::move(reads), first);
      for (std::size_t i = 0; i < g_.node(id).results.size(); ++i)
        inner[{id, static_cast<std::int32_t>(i)}] = {
            made_value.node, static_cast<std::int32_t>(i) + made_value.index};
    }
    for (std::size_t i = 0; i < plan.results.size(); ++i) {
      const Value v = plan.results[i];
      const Chunked& how = r.nodes.at(v.node);
      Loop::Result result;
      if (how.kind == Chunked::Kind::split) {
        const Split& s = how.results[static_cast<std::size_t>(v.index)];
        result = {Loop::Out::stack, s.dim, s.factor};
      } else {
        result.kind = how.kind == Chunked::Kind::sum   ? Loop::Out::sum
                      : how.kind == Chunked::Kind::max ? Loop::Out::max
                                                       : Loop::Out::lse;
      }
      loop->outputs.push_back(result);
      body.add_output(concat("out", i), inner.at(v));
    }
    return loop;
  }

  Value make(Loop& loop, const Region& r, const Read& read, Value first) {
    const auto& [v, need] = read;
    const Node& n = g_.node(v);
    if (need.whole) return loop.body.add(n.op, {}, n.attributes, n.name);
    return clone(loop, r, v.node, *chunked_by_result(g_, v.node, need.split), {}, first);
  }

  // Adds the node on a chunk to the body.
  Value clone(Loop& loop, const Region& r, int id, const Chunked& how, std::vector<Value> operands,
              Value first) const {
    const Node& n = g_.node(id);
    const bool tiny = is_tiny(elements_of(n.results[0]), g_, r.seed, *r.split(r.seed));
    ChunkClone c(loop, first, n, how, std::move(operands), tiny);
    const auto rule = row_of(n.op).clone;
    return rule != nullptr ? rule(c) : c.add();
  }
};

}  // namespace

Graph form_loops(const Graph& graph, const Region& region, std::int64_t chunk) {
  const LoopCut cut{region, chunk};
  std::optional<Graph> formed = form_loops(graph, {&cut, 1}, new_group(graph));
  check(formed.has_value(), "form_loops: the phases wait for each other");
  return std::move(*formed);
}

std::optional<Graph> form_loops(const Graph& graph, std::span<const LoopCut> cuts,
                                const std::string& group) {
  std::optional<Graph> formed = LoopFormer(graph, cuts, group).run();
  if (formed) formed = eliminate_dead(std::move(*formed));
  return formed;
}

std::string group_of(const std::string& symbol) { return symbol.substr(0, symbol.find('_')); }

std::string new_group(const Graph& graph) {
  std::set<std::string> taken;
  for (const Node& n : graph.nodes()) {
    if (n.op == Op::loop) taken.insert(group_of(n.attributes->loop->symbol));
  }
  int number = 0;
  while (taken.contains(concat("c", number))) ++number;
  return concat("c", number);
}

Graph resize_loops(const Graph& graph, const std::string& group, std::int64_t chunk) {
  std::map<const Loop*, std::shared_ptr<const Loop>> resized;
  Rewriter to(graph);
  return to.run([&](int id) -> Value {
    const Node& n = graph.node(id);
    if (n.op != Op::loop || group_of(n.attributes->loop->symbol) != group) return {};
    std::shared_ptr<const Loop>& loop = resized[n.attributes->loop.get()];
    if (loop == nullptr) {
      auto other = std::make_shared<Loop>(*n.attributes->loop);
      other->chunk = std::clamp<std::int64_t>(chunk, 1, std::max<std::int64_t>(other->extent, 1));
      loop = std::move(other);
    }
    Attributes a = n.attributes;
    a.loop = loop;
    return to.with(id, std::move(a));
  });
}

}  // namespace logitless::ir

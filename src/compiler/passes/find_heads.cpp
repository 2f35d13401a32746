#include "compiler/passes/find_heads.h"

#include <algorithm>
#include <cmath>

#include "compiler/ir/build.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

struct Match {
  std::map<int, Value> nodes;  // by node of the pattern: its counterpart in the graph
  std::map<int, Cotangent> cotangents;
};

class HeadFinder {
 public:
  HeadFinder(const Graph& graph, const Lists<int>& users) : g_(graph), users_(users) {}

  std::optional<FoundHead> at(int dot) const {
    const Node& n = g_.node(dot);
    const Attributes& a = n.attributes;
    if (n.op != Op::dot || !a.batch_a.empty() || a.contract_a.size() != 1 ||
        n.results[0].dtype != DType::f32)
      return std::nullopt;
    FoundHead f;
    f.x = n.operands[0];
    f.w = n.operands[1];
    const Type &x = g_.type(f.x), &w = g_.type(f.w);
    if (x.dtype == DType::f64 || x.rank() > 4 || a.contract_a[0] != x.rank() - 1 || w.rank() != 2 ||
        a.contract_b[0] != 1)
      return std::nullopt;
    f.z = f.dot = dot;
    for (bool more = true; more;) more = bias(f) || scale(f) || softcap(f);
    const int last = n.results[0].rank() - 1;
    const auto reads = [&](int node, auto&& wanted) {
      for (const int u : users_[static_cast<std::size_t>(node)]) {
        if (wanted(g_.node(u))) return u;
      }
      return -1;
    };
    f.lse = reads(f.z, [&](const Node& u) {
      return is_reduce(u, Reduce::lse) && u.attributes->dims == std::vector<int>{last} &&
             u.results[0].dtype == DType::f32;
    });
    const auto picks = [&](const Node& u) {
      return u.op == Op::pick && u.attributes->axis == last && u.results[0].rank() == last;
    };
    f.pick = reads(f.z, picks);
    if (f.pick < 0 && f.lse >= 0) {
      const int log_prob = reads(f.z, [&](const Node& u) {
        return is_map(u, Function::sub) && u.operands[0] == Value{f.z, 0} &&
               spreads(u.operands[1]) == Value{f.lse, 0};
      });
      if (log_prob >= 0) f.pick = reads(log_prob, picks);
      f.pick_log_prob = f.pick >= 0;
    }
    if (f.lse < 0 || f.pick < 0) return std::nullopt;
    f.targets = g_.node(f.pick).operands[1];
    return f;
  }

 private:
  const Graph& g_;
  const Lists<int>& users_;

  // Returns the operand of a broadcast along the last dimension.
  Value spreads(Value v) const {
    const Node& n = g_.node(v);
    const bool rows = n.op == Op::broadcast && is_identity(n.attributes->dims) &&
                      static_cast<int>(n.attributes->dims.size()) == n.results[0].rank() - 1;
    return rows ? n.operands[0] : Value{};
  }
  // Returns the first map with `function` that reads z, which is the forward's; -1 if none.
  int reader(int z, Function function) const {
    for (const int u : users_[static_cast<std::size_t>(z)]) {
      if (is_map(g_.node(u), function)) return u;
    }
    return -1;
  }
  Value other(int node, int z) const {
    const std::vector<Value>& in = g_.node(node).operands;
    return in[0].node == z ? in[1] : in[0];
  }
  bool bias(FoundHead& f) const {
    const int sum = reader(f.z, Function::add);
    if (f.bias.valid() || f.scale != 1.0 || f.softcap != 0.0 || sum < 0) return false;
    const int spread = other(sum, f.z).node;
    const Node& b = g_.node(spread);
    const int last = g_.node(f.z).results[0].rank() - 1;
    if (b.op != Op::broadcast || b.attributes->dims != std::vector<int>{last}) return false;
    f.bias = b.operands[0];
    f.spread_bias = spread;
    f.z = sum;
    return true;
  }
  bool scale(FoundHead& f) const {
    if (f.scale != 1.0 || f.softcap != 0.0) return false;
    for (const Function function : {Function::mul, Function::div}) {
      const int scaled = reader(f.z, function);
      if (scaled < 0 || (function == Function::div && g_.node(scaled).operands[0].node != f.z))
        continue;
      const std::optional<double> s = number_of(g_, other(scaled, f.z));
      // A scaling before a tanh belongs to the softcap.
      if (!s || *s == 0.0 || reader(scaled, Function::tanh) >= 0) continue;
      f.scale = function == Function::mul ? *s : 1.0 / *s;
      f.z = scaled;
      return true;
    }
    return false;
  }
  // Matches c tanh(u / c), divided or multiplied by 1 / c.
  bool softcap(FoundHead& f) const {
    if (f.softcap != 0.0) return false;
    for (const Function function : {Function::div, Function::mul}) {
      const int scaled = reader(f.z, function);
      if (scaled < 0) continue;
      const int curve = reader(scaled, Function::tanh);
      const std::optional<double> by = number_of(g_, other(scaled, f.z));
      const int capped = curve < 0 ? -1 : reader(curve, Function::mul);
      if (capped < 0 || !by || *by <= 0.0 ||
          (function == Function::div && g_.node(scaled).operands[0].node != f.z))
        continue;
      const std::optional<double> cap = number_of(g_, other(capped, curve));
      const double c = function == Function::div ? *by : 1.0 / *by;
      if (!cap || std::abs(*cap - c) > 1e-6 * c) continue;
      f.softcap = *cap;
      f.z = capped;
      return true;
    }
    return false;
  }
};

// The pattern to search for: the head alone, with its gradients for two cotangents.
struct Pattern {
  Graph graph;
  std::map<int, Value> known;   // parameters that stand for values of the graph
  int d_lse = -1, d_pick = -1;  // wildcard parameters; -1: absent
  Value d_x, d_w, d_bias;
};

// Each role has its own parameter, even if two roles are one value of the graph: a gradient flows
// through one operand at a time.
Pattern pattern_of(const Graph& graph, const FoundHead& f, bool with_lse, bool with_pick) {
  Graph p;
  const auto parameter = [&](const char* name, const Type& type) {
    Attributes a;
    a.name = name;
    a.type = type;
    return p.add(Op::parameter, {}, a);
  };
  const std::pair<const char*, Value> roles[] = {
      {"x", f.x}, {"w", f.w}, {"targets", f.targets}, {"bias", f.bias}};
  std::vector<Value> given;  // in the order of the roles
  for (const auto& [name, value] : roles)
    given.push_back(value.valid() ? parameter(name, graph.type(value)) : Value{});
  std::map<Value, Value> to;
  const auto copy = [&](auto&& self, Value v) -> Value {
    if (const auto found = to.find(v); found != to.end()) return found->second;
    const Node& n = graph.node(v);
    std::vector<Value> operands;
    if (v.node == f.dot) {
      operands = {given[0], given[1]};
    } else if (v.node == f.spread_bias) {
      operands = {given[3]};
    } else if (v.node == f.pick) {
      operands = {self(self, n.operands[0]), given[2]};
    } else {
      for (const Value o : n.operands) operands.push_back(self(self, o));
    }
    return to[v] = p.add(n.op, operands, n.attributes);
  };
  const Value lse = copy(copy, {f.lse, 0}), pick = copy(copy, {f.pick, 0});
  std::vector<Value> outputs, cotangents;
  if (with_lse) {
    outputs.push_back(lse);
    cotangents.push_back(parameter("d_lse", p.type(lse)));
  }
  if (with_pick) {
    outputs.push_back(pick);
    cotangents.push_back(parameter("d_pick", p.type(pick)));
  }
  std::vector<Value> wrt = {given[0], given[1]};
  if (f.bias.valid()) wrt.push_back(given[3]);
  const std::vector<Value> gradients_of = gradients(p, outputs, cotangents, wrt);
  constexpr const char* kNames[] = {"d_x", "d_w", "d_bias"};
  for (std::size_t i = 0; i < wrt.size(); ++i) p.add_output(kNames[i], gradients_of[i]);
  Pattern out;
  out.graph = eliminate_common(p);
  for (const auto& [name, value] : roles)
    if (const int at = out.graph.find_parameter(name); at >= 0) out.known[at] = value;
  out.d_lse = out.graph.find_parameter("d_lse");
  out.d_pick = out.graph.find_parameter("d_pick");
  Value* const results[] = {&out.d_x, &out.d_w, &out.d_bias};
  for (std::size_t i = 0; i < wrt.size(); ++i) {
    Value v = out.graph.outputs()[i].value;
    // The graph may order dimensions otherwise, or have sums of another dtype, behind it.
    while (out.graph.node(v).op == Op::transpose || out.graph.node(v).op == Op::cast)
      v = out.graph.node(v).operands[0];
    *results[i] = v;
  }
  return out;
}

class Matcher {
 public:
  Matcher(const Graph& graph, const Pattern& pattern) : g_(graph), p_(pattern) {}

  // Returns the node of the graph that computes a value of the pattern, -1 if none. Extends the
  // match.
  int find(Value wanted, Match& match) const {
    if (!wanted.valid()) return -1;
    const Node& root = p_.graph.node(wanted);
    for (int id = 0; id < g_.size(); ++id) {
      if (g_.node(id).op != root.op || g_.node(id).results[0].shape != root.results[0].shape)
        continue;
      Match trial = match;
      if (equal(wanted, {id, 0}, true, trial)) {
        match = std::move(trial);
        return id;
      }
    }
    return -1;
  }

 private:
  const Graph& g_;
  const Pattern& p_;

  static bool commutes(const Node& n) {
    const Function f = n.attributes->function;
    return n.op == Op::map && n.operands.size() == 2 &&
           (f == Function::add || f == Function::mul || f == Function::eq);
  }
  bool wild(Value p) const { return p.node == p_.d_lse || p.node == p_.d_pick; }
  bool bind(int wildcard, Cotangent c, Match& m) const {
    return m.cotangents.emplace(wildcard, c).first->second == c;
  }

  bool equal(Value p, Value a, bool root, Match& m) const {
    if (const auto known = p_.known.find(p.node); known != p_.known.end())
      return known->second == a;
    const Node &pn = p_.graph.node(p), &an = g_.node(a);
    if (wild(p)) {
      std::vector<int> all(pn.results[0].shape.size());
      for (std::size_t d = 0; d < all.size(); ++d) all[d] = static_cast<int>(d);
      return g_.type(a) == pn.results[0] && bind(p.node, {a, all}, m);
    }
    if (const auto seen = m.nodes.find(p.node); seen != m.nodes.end()) return seen->second == a;
    if (pn.op != an.op || p.index != a.index) return false;
    if (root ? pn.results[0].shape != an.results[0].shape : pn.results != an.results) return false;
    // A gradient that is constant over some rows is broadcast to all logits at once.
    if (pn.op == Op::broadcast && wild(pn.operands[0])) {
      const std::vector<int>& dims = an.attributes->dims;
      const int rows = pn.results[0].rank() - 1;
      const bool of_rows = std::all_of(dims.begin(), dims.end(), [&](int d) { return d < rows; });
      return of_rows && g_.type(an.operands[0]).dtype == DType::f32 &&
             bind(pn.operands[0].node, {an.operands[0], dims}, m);
    }
    if (!same(pn.attributes, an.attributes) || pn.operands.size() != an.operands.size())
      return false;
    Match trial = m;
    if (operands_equal(pn, an, false, trial) ||
        (commutes(pn) && (trial = m, operands_equal(pn, an, true, trial)))) {
      m = std::move(trial);
      m.nodes[p.node] = a;
      return true;
    }
    return false;
  }
  bool operands_equal(const Node& pn, const Node& an, bool swapped, Match& m) const {
    for (std::size_t i = 0; i < pn.operands.size(); ++i) {
      if (!equal(pn.operands[i], an.operands[swapped ? 1 - i : i], false, m)) return false;
    }
    return true;
  }
  static bool same(const Attributes& p, const Attributes& a) {
    return p.function == a.function && p.reduce == a.reduce && p.number == a.number &&
           p.axis == a.axis && p.dims == a.dims && p.batch_a == a.batch_a &&
           p.batch_b == a.batch_b && p.contract_a == a.contract_a && p.contract_b == a.contract_b &&
           p.begin == a.begin && p.end == a.end;
  }
};

}  // namespace

std::optional<FoundHead> find_head(const Graph& graph, const Lists<int>& users, int dot) {
  return HeadFinder(graph, users).at(dot);
}

HeadGradients find_head_gradients(const Graph& graph, const FoundHead& head) {
  // Tries gradients of both lse and pick, then of each alone.
  for (const auto& [lse, pick] : {std::pair{true, true}, {true, false}, {false, true}}) {
    const Pattern pattern = pattern_of(graph, head, lse, pick);
    const Matcher matcher(graph, pattern);
    Match match;
    HeadGradients found;
    found.d_x = matcher.find(pattern.d_x, match);
    found.d_w = matcher.find(pattern.d_w, match);
    found.d_bias = matcher.find(pattern.d_bias, match);
    if (!found.any()) continue;
    const auto cotangent = [&](int wildcard) {
      const auto bound = match.cotangents.find(wildcard);
      return bound == match.cotangents.end() ? Cotangent{} : bound->second;
    };
    found.d_lse = cotangent(pattern.d_lse);
    found.d_pick = cotangent(pattern.d_pick);
    return found;
  }
  return {};
}

}  // namespace logitless::ir

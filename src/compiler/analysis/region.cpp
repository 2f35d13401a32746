#include "compiler/analysis/region.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "compiler/analysis/cheap.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ops/op.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

constexpr std::size_t kMostNodes = 1000;  // of a region that all values lead through

// Which small values may lead from one big value to another.
enum class Leading : std::uint8_t {
  tiny,  // a few numbers for each row
  all,   // whatever is not big: a hidden state, the scores of all classes
};

class Grower {
 public:
  Grower(const Graph& graph, const std::vector<std::vector<int>>& users, Value seed,
         Leading leading)
      : g_(graph), users_(users), seed_(elements_of(graph.type(seed))), leading_(leading) {
    region_.seed = seed;
  }

  Region run(const Split& split) {
    const std::optional<Chunked> first = chunked_by_result(g_, region_.seed.node, split);
    if (!first || g_.node(region_.seed).results.size() > 1 ||
        row_of(g_.node(region_.seed).op).of_nothing)
      return region_;
    std::int64_t extent = 1;
    for (int k = 0; k < split.count; ++k)
      extent *= sizes_of(g_.type(region_.seed))[static_cast<std::size_t>(split.dim + k)];
    split_ = split;
    region_.extent = extent / split.factor;
    enter(region_.seed.node, *first);
    while (!queue_.empty()) {
      if (leading_ == Leading::all && region_.nodes.size() > kMostNodes) return {};
      const int node = queue_.front();
      queue_.pop_front();
      backward(node);
      forward(node);
    }
    if (leading_ == Leading::tiny) return pruned(std::move(region_), false);
    // Joining them may have to wait for a later phase.
    Region joined = pruned(region_, true);
    if (joined.phases < 2) return joined;
    Region apart = pruned(std::move(region_), false);
    return apart.phases < joined.phases ? apart : joined;
  }

 private:
  const Graph& g_;
  const std::vector<std::vector<int>>& users_;
  const std::int64_t seed_;
  const Leading leading_;
  Split split_;
  Region region_;
  std::deque<int> queue_;
  std::set<std::pair<int, int>> noted_;

  bool big(Value v) const { return is_big(elements_of(g_.type(v)), seed_); }
  bool leads(Value v) const {
    return leading_ == Leading::all || is_tiny(elements_of(g_.type(v)), g_, region_.seed, split_);
  }
  bool big_node(int node) const { return big({node, 0}); }
  void enter(int node, const Chunked& how) {
    region_.nodes.emplace(node, how);
    queue_.push_back(node);
  }
  void boundary(int node, int of, const std::string& why) {
    if (noted_.insert({node, of}).second) region_.boundaries.push_back(why);
  }
  std::string shown(int node) const { return description_of(g_.node(node)); }

  void backward(int node) {
    const Chunked how = region_.nodes.at(node);
    for (std::size_t i = 0; i < how.needs.size(); ++i) {
      const Value v = g_.node(node).operands[i];
      if (how.needs[i].whole || region_.inside(v.node)) continue;
      const Op op = g_.node(v).op;
      if (op == Op::parameter || row_of(op).of_nothing) continue;
      if (!big(v) && !is_own_mask(v)) continue;
      if (std::optional<Chunked> c = chunked_by_value(v, how.needs[i].split)) {
        enter(v.node, *c);
      } else if (big(v)) {
        boundary(v.node, node,
                 concat(shown(v.node), " cannot be cut along ", text_of(how.needs[i].split)));
      }
    }
  }
  // Made of indices and numbers alone, of the size of a few rows at least, and read by few: a mask
  // that would be whole outside. One that many layers read stays there.
  bool is_own_mask(Value v) const {
    constexpr std::size_t kFewReaders = 2;
    constexpr std::int64_t kLeastShare = 64;
    return elements_of(g_.type(v)) * kLeastShare >= seed_ &&
           users_[static_cast<std::size_t>(v.node)].size() <= kFewReaders && is_of_indices(v);
  }
  bool is_of_indices(Value v) const {
    constexpr int kFewSteps = 16;
    int steps = 0;
    const auto made = [&](auto&& self, Value x) -> bool {
      const Node& n = g_.node(x);
      if (++steps > kFewSteps) return false;
      if (row_of(n.op).of_nothing) return true;
      const bool moves = n.op == Op::broadcast || n.op == Op::reshape || n.op == Op::transpose;
      if (!moves && (row_of(n.op).work != Work::elementwise || is_costly(n))) return false;
      return std::all_of(n.operands.begin(), n.operands.end(),
                         [&](Value o) { return self(self, o); });
    };
    return made(made, v);
  }
  // Result `index` is to be cut so: the relation is asked of result 0, and must agree.
  std::optional<Chunked> chunked_by_value(Value v, const Split& s) const {
    std::optional<Chunked> c = chunked_by_result(g_, v.node, s);
    if (c && c->results[static_cast<std::size_t>(v.index)] != s) c.reset();
    return c;
  }

  void forward(int node) {
    const Chunked how = region_.nodes.at(node);
    if (how.kind != Chunked::Kind::split) return;
    for (const int user : users_[static_cast<std::size_t>(node)]) {
      if (region_.inside(user)) continue;
      const Node& u = g_.node(user);
      for (std::size_t i = 0; i < u.operands.size(); ++i) {
        const Value v = u.operands[i];
        if (v.node != node) continue;
        const std::optional<Chunked> c =
            chunked_by_operand(g_, user, i, how.results[static_cast<std::size_t>(v.index)]);
        const bool from_big = big(v);
        if (!c) {
          if (from_big)
            boundary(user, node,
                     concat(shown(user), " cannot run on a cut along ",
                            text_of(how.results[static_cast<std::size_t>(v.index)]), " of ",
                            shown(node)));
          continue;
        }
        if (c->kind != Chunked::Kind::split) {
          if (from_big) region_.nodes.emplace(user, *c);
        } else if (big_node(user) || leads({user, 0})) {
          enter(user, *c);
        } else if (from_big) {
          region_.nodes.emplace(user, *c);  // of middle size: a result, and nothing grows from it
        }
        break;
      }
    }
  }

  Region pruned(Region region, bool join) {
    prune(region, join);
    find_phases(region);
    return region;
  }

  // Small nodes stay only where they read a big value, or lead to one, or `join` some that stay.
  void prune(Region& region, bool join) {
    std::set<int> wanted, leads;
    for (auto it = region.nodes.rbegin(); it != region.nodes.rend(); ++it) {
      const auto& [node, how] = *it;
      bool keep = wanted.contains(node) || (big_node(node) && how.kind == Chunked::Kind::split);
      for (std::size_t i = 0; i < how.needs.size(); ++i)
        keep = keep || (big(g_.node(node).operands[i]) && flows(region, g_, node, i));
      const bool joins = join && joins_wide(region, node, how);
      if (!keep && !joins) continue;
      wanted.insert(node);
      for (std::size_t i = 0; joins && i < how.needs.size(); ++i) {
        if (flows(region, g_, node, i)) wanted.insert(g_.node(node).operands[i].node);
      }
      // Only small values that feed a big one, or another small one on the way to it.
      const bool on_the_way =
          how.kind == Chunked::Kind::split && (big_node(node) || leads.contains(node));
      for (std::size_t i = 0; on_the_way && i < how.needs.size(); ++i) {
        const int p = g_.node(node).operands[i].node;
        if (!flows(region, g_, node, i)) continue;
        wanted.insert(p);
        leads.insert(p);
      }
    }
    std::erase_if(region.nodes, [&](const auto& entry) { return !wanted.contains(entry.first); });
  }
  // Several wide values that become one, as parts of a gradient do: one leaves the loop instead.
  bool joins_wide(const Region& region, int node, const Chunked& how) const {
    const std::int64_t elements = elements_of(g_.node(node).results[0]);
    if (how.kind != Chunked::Kind::split || is_tiny(elements, g_, region.seed, split_))
      return false;
    int joined = 0;
    for (std::size_t i = 0; i < how.needs.size(); ++i)
      joined +=
          flows(region, g_, node, i) && elements_of(g_.type(g_.node(node).operands[i])) >= elements;
    return joined > 1;
  }

  void find_phases(Region& region) const {
    region.phase.assign(static_cast<std::size_t>(g_.size()), 0);
    std::vector<bool> inside(static_cast<std::size_t>(g_.size()), false);
    for (const auto& [node, how] : region.nodes) inside[static_cast<std::size_t>(node)] = true;
    for (int id = 0; id < g_.size(); ++id) {
      const Node& n = g_.node(id);
      int& phase = region.phase[static_cast<std::size_t>(id)];
      const bool here = inside[static_cast<std::size_t>(id)];
      for (std::size_t i = 0; i < n.operands.size(); ++i) {
        const auto p = static_cast<std::size_t>(n.operands[i].node);
        const bool waits = inside[p] && !(here && flows(region, g_, id, i));
        phase = std::max(phase, region.phase[p] + (waits ? 1 : 0));
      }
      if (here) region.phases = std::max(region.phases, phase + 1);
    }
  }
};

// --- unit tangents

class UnitTangent {
 public:
  UnitTangent(const Graph& g, const Region& region, Value scalar, std::vector<int> degree)
      : g_(g), region_(region), scalar_(scalar), degree_(std::move(degree)) {}

  UnitTangents run() {
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) {
      const Node& n = g_.node(id);
      if (region_.inside(id) && degree_[static_cast<std::size_t>(id)] == 1) continue;  // on demand
      std::vector<Value> operands;
      for (const Value v : n.operands) operands.push_back(plain(v));
      plain_[id] = out_.copy(g_, id, std::move(operands)).node;
    }
    for (const Output& output : g_.outputs()) out_.add_output(output.name, plain(output.value));
    const Value seed = unit(region_.seed);
    std::vector<int> copies(static_cast<std::size_t>(g_.size()), -1);
    for (const auto* nodes : {&plain_, &unit_}) {
      for (const auto& [from, to] : *nodes) copies[static_cast<std::size_t>(from)] = to;
    }
    return {std::move(out_), seed, std::move(copies)};
  }

 private:
  const Graph& g_;
  const Region& region_;
  const Value scalar_;
  const std::vector<int> degree_;
  Graph out_;
  std::map<int, int> plain_, unit_;
  std::map<Value, Value> scaled_;

  bool linear(Value v) const { return degree_[static_cast<std::size_t>(v.node)] == 1; }

  Value plain(Value v) {
    const auto found = plain_.find(v.node);
    if (found != plain_.end()) return {found->second, v.index};
    const auto done = scaled_.find(v);
    if (done != scaled_.end()) return done->second;
    // A linear node of the region, wanted outside: times the scalar, in fp32.
    const Value x = unit(v);
    const Type type = g_.type(v);
    const Value s = plain(scalar_);
    const DType wide = type.dtype == DType::f64 ? DType::f64 : DType::f32;
    Attributes to;
    to.type = {wide, {}};
    Value factor = g_.type(scalar_).dtype == wide ? s : out_.add(Op::cast, {s}, to);
    if (out_.type(factor).rank() > 0) {
      Attributes flat;
      factor = out_.add(Op::reshape, {factor}, flat);
    }
    Attributes spread;
    spread.type.shape = type.shape;
    factor = out_.add(Op::broadcast, {factor}, spread);
    Value wide_x = type.dtype == wide ? x : out_.add(Op::cast, {x}, to);
    Attributes multiply;
    multiply.function = Function::mul;
    Value product = out_.add(Op::map, {wide_x, factor}, multiply);
    if (type.dtype != wide) {
      Attributes back;
      back.type.dtype = type.dtype;
      product = out_.add(Op::cast, {product}, back);
    }
    return scaled_[v] = product;
  }

  // The value for a scalar of 1.
  Value unit(Value v) {
    if (!linear(v)) return plain(v);
    const auto found = unit_.find(v.node);
    if (found != unit_.end()) return {found->second, v.index};
    const Node& n = g_.node(v);
    if (v.node == scalar_.node) {
      Attributes one;
      one.number = 1.0;
      one.type = n.results[0];
      unit_[v.node] = out_.add(Op::constant, {}, one).node;
    } else {
      std::vector<Value> operands;
      for (const Value o : n.operands) operands.push_back(unit(o));
      unit_[v.node] = out_.copy(g_, v.node, std::move(operands)).node;
    }
    return {unit_[v.node], v.index};
  }
};

}  // namespace

bool is_tiny(std::int64_t elements, const Graph& graph, Value seed, const Split& split) {
  constexpr std::int64_t kNumbersPerRow = 8;
  const std::vector<std::int64_t> sizes = sizes_of(graph.type(seed));
  const std::int64_t all = elements_of(graph.type(seed));
  std::int64_t rows = all / std::max<std::int64_t>(sizes.back(), 1);
  if (split.dim + split.count == static_cast<int>(sizes.size())) {
    rows = 1;
    for (int d = split.dim; d < split.dim + split.count; ++d)
      rows *= sizes[static_cast<std::size_t>(d)];
  }
  return 16 * elements <= all && elements <= kNumbersPerRow * rows;
}

const Split* Region::split(Value v) const {
  const auto found = nodes.find(v.node);
  if (found == nodes.end() || found->second.kind != Chunked::Kind::split) return nullptr;
  return &found->second.results[static_cast<std::size_t>(v.index)];
}

bool flows(const Region& region, const Graph& graph, int node, std::size_t i) {
  const Need& need = region.nodes.at(node).needs[i];
  const Split* from = region.split(graph.node(node).operands[i]);
  return !need.whole && from != nullptr && *from == need.split;
}

Region grow_region(const Graph& graph, Value seed, const Split& split) {
  return grow_region(graph, graph.users(), seed, split);
}
Region grow_region(const Graph& graph, const std::vector<std::vector<int>>& users, Value seed,
                   const Split& split) {
  Region region = Grower(graph, users, seed, Leading::tiny).run(split);
  if (region.phases < 2) return region;
  // What leads from the big values of one phase to those of the next is computed in every chunk, be
  // it wide: that costs memory of a chunk, and another phase the big values once more.
  Region wide = Grower(graph, users, seed, Leading::all).run(split);
  return !wide.nodes.empty() && wide.phases < region.phases ? wide : region;
}

std::optional<UnitTangents> unit_tangents(const Graph& graph, const Region& region) {
  if (region.phases < 2) return std::nullopt;
  for (int id = 0; id < graph.size(); ++id) {
    if (region.inside(id) || region.phase[static_cast<std::size_t>(id)] == 0) continue;
    const Node& n = graph.node(id);
    if (n.results.size() != 1 || elements_of(n.results[0]) != 1 || n.op == Op::constant) continue;
    const std::vector<int> degree = degrees(graph, {id, 0});
    bool any = false, ok = true;
    for (const auto& [node, how] : region.nodes) {
      const int d = degree[static_cast<std::size_t>(node)];
      any = any || d == 1;
      ok = ok && d >= 0 &&
           !(d == 1 && (how.kind == Chunked::Kind::max || how.kind == Chunked::Kind::lse));
    }
    if (!any || !ok) continue;
    return UnitTangent(graph, region, {id, 0}, degree).run();
  }
  return std::nullopt;
}

}  // namespace logitless::ir

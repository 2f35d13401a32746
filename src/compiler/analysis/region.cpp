#include "compiler/analysis/region.h"

#include <algorithm>
#include <set>
#include <utility>

#include "compiler/analysis/linearity.h"
#include "compiler/analysis/values.h"
#include "compiler/ops/op.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

// Returns the rows of the seed, or its columns if those are cut.
std::int64_t rows_of(const Graph& graph, Value seed, const Split& split) {
  const std::vector<std::int64_t> sizes = sizes_of(graph.type(seed));
  std::int64_t rows = elements_of(graph.type(seed)) / std::max<std::int64_t>(sizes.back(), 1);
  if (split.dim + split.count == static_cast<int>(sizes.size())) {
    rows = 1;
    for (int d = split.dim; d < split.dim + split.count; ++d)
      rows *= sizes[static_cast<std::size_t>(d)];
  }
  return rows;
}
bool is_tiny(std::int64_t elements, std::int64_t seed, std::int64_t rows) {
  constexpr std::int64_t kNumbersPerRow = 8;
  return 16 * elements <= seed && elements <= kNumbersPerRow * rows;
}

constexpr std::size_t kMostNodes = 1000;  // of a region with Leading::all

// The small values that may connect one big value to another.
enum class Leading : std::uint8_t {
  tiny,  // a few numbers for each row
  all,   // all that are not big: a hidden state, the scores of all classes
};

class Grower {
 public:
  Grower(const Graph& graph, const Lists<int>& users, Value seed, Leading leading)
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
    rows_ = rows_of(g_, region_.seed, split);
    region_.extent = extent / split.factor;
    enter(region_.seed.node, *first);
    for (std::size_t next = 0; next < queue_.size(); ++next) {
      if (leading_ == Leading::all && region_.nodes.size() > kMostNodes) return {};
      const int node = queue_[next];
      backward(node);
      forward(node);
    }
    region_.nodes.sort();
    if (leading_ == Leading::tiny) return pruned(std::move(region_), false);
    // Joins may have to wait for a later phase, so the region without them is tried, too.
    Region joined = pruned(region_, true);
    if (joined.phases < 2) return joined;
    Region apart = pruned(std::move(region_), false);
    return apart.phases < joined.phases ? apart : joined;
  }

 private:
  const Graph& g_;
  const Lists<int>& users_;
  const std::int64_t seed_;
  const Leading leading_;
  std::int64_t rows_ = 0;
  Region region_;
  std::vector<int> queue_;
  std::set<std::pair<int, int>> noted_;

  bool big(Value v) const { return is_big(elements_of(g_.type(v)), seed_); }
  bool leads(Value v) const { return leading_ == Leading::all || tiny(elements_of(g_.type(v))); }
  bool tiny(std::int64_t elements) const { return is_tiny(elements, seed_, rows_); }
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
  // Returns whether the value is a mask that is best made inside: computed from indices and
  // constants alone, at least a few rows large, and read by few nodes. A mask that many layers read
  // stays outside.
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
  // Returns how the node runs if result `index` is cut so. Cut rules are for result 0, whose
  // consequences must agree.
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
          // Medium size: it is a result, and the region does not grow from it.
          region_.nodes.emplace(user, *c);
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

  // Removes small nodes, except those that read a big value, lead to one, or `join` remaining ones.
  void prune(Region& region, bool join) {
    const auto size = static_cast<std::size_t>(g_.size());
    std::vector<bool> wanted(size), leads(size);
    for (auto it = region.nodes.rbegin(); it != region.nodes.rend(); ++it) {
      const auto& [node, how] = *it;
      const auto at = static_cast<std::size_t>(node);
      bool keep = wanted[at] || (big_node(node) && how.kind == Chunked::Kind::split);
      for (std::size_t i = 0; !keep && i < how.needs.size(); ++i)
        keep = big(g_.node(node).operands[i]) && flows(region, g_, node, i);
      const bool joins = join && joins_wide(region, node, how);
      if (!keep && !joins) continue;
      wanted[at] = true;
      for (std::size_t i = 0; joins && i < how.needs.size(); ++i) {
        if (flows(region, g_, node, i))
          wanted[static_cast<std::size_t>(g_.node(node).operands[i].node)] = true;
      }
      // Keeps small values only if they feed a big one, or a small one that leads to a big one.
      const bool on_the_way = how.kind == Chunked::Kind::split && (big_node(node) || leads[at]);
      for (std::size_t i = 0; on_the_way && i < how.needs.size(); ++i) {
        const auto p = static_cast<std::size_t>(g_.node(node).operands[i].node);
        if (!flows(region, g_, node, i)) continue;
        wanted[p] = leads[p] = true;
      }
    }
    region.nodes.keep(wanted);
  }
  // Returns whether the node joins several wide values into one, like the parts of a gradient. Then
  // one value leaves the loop instead of several.
  bool joins_wide(const Region& region, int node, const Chunked& how) const {
    const std::int64_t elements = elements_of(g_.node(node).results[0]);
    if (how.kind != Chunked::Kind::split || tiny(elements)) return false;
    int joined = 0;
    for (std::size_t i = 0; i < how.needs.size(); ++i)
      joined +=
          flows(region, g_, node, i) && elements_of(g_.type(g_.node(node).operands[i])) >= elements;
    return joined > 1;
  }

  void find_phases(Region& region) const {
    region.phase.assign(static_cast<std::size_t>(g_.size()), 0);
    if (region.nodes.empty()) return;
    // Nodes before the first one inside read nothing inside, and nothing inside reads nodes after
    // the last one, so neither can wait.
    for (int id = region.nodes.begin()->first; id <= region.nodes.rbegin()->first; ++id) {
      const Node& n = g_.node(id);
      int& phase = region.phase[static_cast<std::size_t>(id)];
      const bool here = region.inside(id);
      for (std::size_t i = 0; i < n.operands.size(); ++i) {
        const int p = n.operands[i].node;
        const int before = region.phase[static_cast<std::size_t>(p)];
        if (before + 1 <= phase) continue;
        const bool waits = region.inside(p) && !(here && flows(region, g_, id, i));
        phase = std::max(phase, before + (waits ? 1 : 0));
      }
      if (here) region.phases = std::max(region.phases, phase + 1);
    }
  }
};

// --- unit cotangents

class UnitCotangent {
 public:
  UnitCotangent(const Graph& g, const Region& region, Value scalar, std::vector<int> degree)
      : g_(g), region_(region), scalar_(scalar), degree_(std::move(degree)) {}

  UnitCotangents run() {
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) {
      const Node& n = g_.node(id);
      // Copied on demand.
      if (region_.inside(id) && degree_[static_cast<std::size_t>(id)] == 1) continue;
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
    // A linear node of the region that is read outside: its unit value times the scalar, in fp32.
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

  // Returns the value for a scalar of 1.
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
  return is_tiny(elements, elements_of(graph.type(seed)), rows_of(graph, seed, split));
}

void ChunkedNodes::emplace(int node, const Chunked& how) {
  const auto at = static_cast<std::size_t>(node);
  if (at >= place_.size()) place_.resize(at + 1, -1);
  if (place_[at] >= 0) return;
  place_[at] = static_cast<int>(entries_.size());
  entries_.emplace_back(node, how);
}
void ChunkedNodes::sort() {
  const auto before = [](const Entry& a, const Entry& b) { return a.first < b.first; };
  if (std::is_sorted(entries_.begin(), entries_.end(), before)) return;
  std::sort(entries_.begin(), entries_.end(), before);
  number();
}
void ChunkedNodes::keep(const std::vector<bool>& keep) {
  std::erase_if(entries_, [&](const Entry& entry) {
    const auto at = static_cast<std::size_t>(entry.first);
    if (!keep[at]) place_[at] = -1;
    return !keep[at];
  });
  number();
}
void ChunkedNodes::clear() {
  entries_.clear();
  place_.clear();
}
void ChunkedNodes::number() {
  for (std::size_t i = 0; i < entries_.size(); ++i)
    place_[static_cast<std::size_t>(entries_[i].first)] = static_cast<int>(i);
}

const Split* Region::split(Value v) const {
  if (!nodes.contains(v.node)) return nullptr;
  const Chunked& how = nodes.at(v.node);
  return how.kind == Chunked::Kind::split ? &how.results[static_cast<std::size_t>(v.index)]
                                          : nullptr;
}

bool flows(const Region& region, const Graph& graph, int node, std::size_t i) {
  const Need& need = region.nodes.at(node).needs[i];
  const Split* from = region.split(graph.node(node).operands[i]);
  return !need.whole && from != nullptr && *from == need.split;
}

Region grow_region(const Graph& graph, Value seed, const Split& split) {
  return grow_region(graph, graph.users(), seed, split);
}
Region grow_region(const Graph& graph, const Lists<int>& users, Value seed, const Split& split) {
  Region region = Grower(graph, users, seed, Leading::tiny).run(split);
  if (region.phases < 2) return region;
  // Values between the big values of two phases are computed in every chunk, even wide ones. That
  // costs memory of a chunk; another phase would recompute the big values.
  Region wide = Grower(graph, users, seed, Leading::all).run(split);
  return !wide.nodes.empty() && wide.phases < region.phases ? wide : region;
}

std::optional<UnitCotangents> unit_cotangents(const Graph& graph, const Region& region) {
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
    return UnitCotangent(graph, region, {id, 0}, degree).run();
  }
  return std::nullopt;
}

}  // namespace logitless::ir

#include <set>
#include <utility>
#include <vector>

#include "compiler/passes/form_loops.h"

namespace logitless::ir {
namespace {

class Parter {
 public:
  Parter(const Graph& graph, const Region& region)
      : g_(graph), region_(region), seed_(elements_of(graph.type(region.seed))) {}

  std::optional<SumsApart> run(std::int64_t least) {
    const std::optional<LargeSums> sums = large_sums(g_, region_, least);
    if (!sums) return std::nullopt;
    sums_.insert(sums->nodes.begin(), sums->nodes.end());
    // Iterates from readers to operands.
    for (auto it = region_.nodes.rbegin(); it != region_.nodes.rend(); ++it) {
      const int node = it->first;
      if (!sums_.contains(node) && !copied_.contains(node)) continue;
      for (const Value v : g_.node(node).operands) {
        if (region_.split(v) != nullptr && is_big(elements_of(g_.type(v)), seed_))
          copied_.insert(v.node);
      }
    }
    if (copied_.empty()) return std::nullopt;
    write();
    SumsApart apart{std::move(out_), first(), sums->bytes, {}};
    return cut_copies(apart) ? std::optional(std::move(apart)) : std::nullopt;
  }

 private:
  const Graph& g_;
  const Region& region_;
  const std::int64_t seed_;
  std::set<int> sums_, copied_;    // nodes of the graph
  std::vector<int> place_, copy_;  // by node: its new index, and that of its copy if there is one
  Graph out_;

  static int at(const std::vector<int>& places, int node) {
    return places[static_cast<std::size_t>(node)];
  }
  Value add(int id, const std::vector<int>& places) {
    std::vector<Value> operands;
    for (const Value v : g_.node(id).operands) operands.push_back({at(places, v.node), v.index});
    return out_.copy(g_, id, std::move(operands));
  }

  void write() {
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) {
      const int itself = add(id, sums_.contains(id) ? copy_ : place_).node;
      place_.push_back(itself);
      copy_.push_back(copied_.contains(id) ? add(id, copy_).node : itself);
    }
    for (const Output& o : g_.outputs())
      out_.add_output(o.name, {at(place_, o.value.node), o.value.index});
  }

  Region first() const {
    Region region = region_;
    region.seed.node = at(place_, region.seed.node);
    region.phase.assign(static_cast<std::size_t>(copy_.back()) + 1, 0);
    region.nodes.clear();
    for (const auto& [node, how] : region_.nodes) {
      region.phase[static_cast<std::size_t>(at(place_, node))] =
          region_.phase[static_cast<std::size_t>(node)];
      if (!sums_.contains(node)) region.nodes.emplace(at(place_, node), how);
    }
    region.nodes.sort();
    return region;
  }

  bool cut_copies(SumsApart& apart) const {
    const int last = *copied_.rbegin();
    const Value seed{at(copy_, last), 0};
    const Lists<int> users = apart.graph.users();
    const int rank = static_cast<int>(apart.graph.type(seed).rank());
    for (int d = rank - 1; d >= 0; --d) {
      const Split split = normalized(sizes_of(apart.graph.type(seed)), {d, 1, 1});
      apart.copies = grow_region(apart.graph, users, seed, split);
      if (holds_all(apart)) return true;
    }
    return false;
  }
  bool holds_all(const SumsApart& apart) const {
    if (apart.copies.phases != 1) return false;
    for (const int node : sums_) {
      if (apart.copies.split({at(place_, node), 0}) == nullptr) return false;
    }
    for (const int node : copied_) {
      if (apart.copies.split({at(copy_, node), 0}) == nullptr) return false;
    }
    for (const auto& [node, how] : apart.copies.nodes) {
      if (apart.region.inside(node)) return false;
    }
    return true;
  }
};

}  // namespace

std::optional<LargeSums> large_sums(const Graph& graph, const Region& region, std::int64_t least) {
  constexpr std::int64_t kSumBytes = 4;  // of an element
  LargeSums sums;
  for (const auto& [node, how] : region.nodes) {
    const Type& type = graph.node(node).results[0];
    const std::int64_t bytes = kSumBytes * elements_of(type);
    if (how.kind != Chunked::Kind::sum || size_of(type.dtype) >= kSumBytes || bytes < least)
      continue;
    if (region.phase[static_cast<std::size_t>(node)] + 1 != region.phases) return std::nullopt;
    sums.nodes.push_back(node);
    sums.bytes += bytes;
  }
  return sums.nodes.empty() ? std::nullopt : std::optional(std::move(sums));
}

std::optional<SumsApart> sums_apart(const Graph& graph, const Region& region, std::int64_t least) {
  return Parter(graph, region).run(least);
}

}  // namespace logitless::ir

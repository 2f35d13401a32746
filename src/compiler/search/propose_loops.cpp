// form-loops: turns a region around a big value, and all regions like it, into loops.
#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>

#include "compiler/analysis/region.h"
#include "compiler/passes/form_loops.h"
#include "compiler/passes/passes.h"
#include "compiler/search/plan.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

constexpr int kMostRoles = 8;  // roles of values that are tried at one peak
constexpr std::size_t kLeastRoles = 2;
constexpr std::int64_t kLeastPart = 16;  // of the peak: smaller sums are not divided
constexpr int kParts[] = {2, 4, 8};      // of sums that only their rows' loops can make
constexpr int kFirstChunks = 16;  // the first number of chunks; other numbers are separate moves

// The values of one role that are live at the peak.
struct Role {
  std::vector<int> nodes;  // the biggest first
  std::int64_t bytes = 0;
};

// A graph and the readers of its nodes, computed once for all its regions.
struct Source {
  explicit Source(Graph g) : own(std::move(g)), graph(*own), users(graph.users()) {}
  explicit Source(const Graph* g) : graph(*g), users(graph.users()) {}
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  const std::optional<Graph> own;
  const Graph& graph;
  const Lists<int> users;
};

// The region around a value, with as few phases as cotangents allow.
struct Candidate {
  std::shared_ptr<const Source> source;  // before loops; cotangents are 1 where that saves phases
  Region region;
  const Graph& graph() const { return source->graph; }
  std::vector<int> alike;  // other seeds of the role, in that graph
  bool unit = false;
};

Candidate candidate_of(std::shared_ptr<const Source> source, Value seed, const Split& split,
                       const std::vector<int>& alike) {
  Region first = grow_region(source->graph, source->users, seed, split);
  Candidate c{std::move(source), std::move(first), alike, false};
  for (int round = 0; round < 4 && c.region.phases > 1; ++round) {
    std::optional<UnitCotangents> unit = unit_cotangents(c.graph(), c.region);
    if (!unit) break;
    auto changed = std::make_shared<const Source>(std::move(unit->graph));
    Region region = grow_region(changed->graph, changed->users, unit->seed, split);
    if (region.nodes.empty() || region.phases >= c.region.phases) break;
    std::vector<int> others;
    for (const int node : c.alike) {
      if (const int copy = unit->copies[static_cast<std::size_t>(node)]; copy >= 0)
        others.push_back(copy);
    }
    c = {std::move(changed), std::move(region), std::move(others), true};
  }
  return c;
}

std::vector<Split> splits_of(const Type& type) {
  const std::vector<std::int64_t> sizes = sizes_of(type);
  const int rank = static_cast<int>(sizes.size());
  std::vector<Split> splits;
  for (int d = 0; d < rank; ++d) {
    std::int64_t extent = 1;
    for (int count = 1; d + count <= rank; ++count) {
      extent *= sizes[static_cast<std::size_t>(d + count - 1)];
      const Split s = normalized(sizes, {d, count, 1});
      // A cut must divide rows: a single chunk is no cut, and the last dimension joins no group.
      if (s != Split{d, count, 1} || extent < 2 || (count > 1 && d + count == rank)) continue;
      splits.push_back(s);
    }
  }
  return splits;
}

// Returns the elements of the axis that make matrix products efficient: rows of the seed, or
// columns if those are cut.
std::int64_t thick(const Graph& graph, const Region& region, std::int64_t rows_wanted) {
  const Split& split = *region.split(region.seed);
  const std::vector<std::int64_t> sizes = sizes_of(graph.type(region.seed));
  std::int64_t rows = split.factor;
  if (split.dim + split.count < static_cast<int>(sizes.size())) {
    std::int64_t elements = 1;
    for (const std::int64_t s : sizes) elements *= s;
    rows = elements / std::max<std::int64_t>(region.extent * sizes.back(), 1);
  }
  return std::max<std::int64_t>(1, rows_wanted / std::max<std::int64_t>(rows, 1));
}

std::int64_t first_chunk(const Graph& graph, const Region& region, const MoveSink& sink) {
  const std::int64_t extent = region.extent;
  if (sink.chunks() > 0)
    return std::max<std::int64_t>((extent + sink.chunks() - 1) / sink.chunks(), 1);
  const std::int64_t few = chunk_of(extent, kFirstChunks, sink.target());
  return std::min(std::max(few, thick(graph, region, sink.target().thick_rows())),
                  (extent + 1) / 2);
}

// Returns the regions of all equal seeds that can run as loops beside the first one.
std::vector<LoopCut> cuts_of(const Candidate& c, std::int64_t chunk) {
  std::vector<LoopCut> cuts;
  cuts.push_back({c.region, chunk});
  const Split& split = *c.region.split(c.region.seed);
  std::set<int> taken;
  for (const auto& [node, how] : c.region.nodes) taken.insert(node);
  for (const int node : c.alike) {
    if (taken.contains(node)) continue;
    Region r = grow_region(c.graph(), c.source->users, {node, 0}, split);
    const bool apart = std::none_of(r.nodes.begin(), r.nodes.end(),
                                    [&](const auto& n) { return taken.contains(n.first); });
    if (r.nodes.empty() || !apart || r.extent != c.region.extent || r.phases != c.region.phases)
      continue;
    for (const auto& [n, how] : r.nodes) taken.insert(n);
    cuts.push_back({std::move(r), chunk});
  }
  return cuts;
}

void describe(const Graph& graph, const LoopCut& cut, bool unit_cotangents, ChunkedRegion& region) {
  region.seed = shown(graph, cut.region.seed.node);
  region.cut = text_of(*cut.region.split(cut.region.seed));
  region.extent = cut.region.extent;
  region.chunk = cut.chunk;
  region.phases = cut.region.phases;
  region.unit_cotangents = unit_cotangents;
  region.boundaries = cut.region.boundaries;
}

// Returns the move with these loops, or nothing if the loops would be too long.
std::optional<Move> formed(const Plan& plan, const Graph& source, std::span<const LoopCut> cuts,
                           bool unit_cotangents) {
  ChunkedRegion region;
  region.group = new_group(source);
  std::optional<Graph> graph = form_loops(source, cuts, region.group);
  if (!graph && cuts.size() > 1) {  // loops of different layers wait for each other
    cuts = cuts.first(1);
    graph = form_loops(source, cuts, region.group);
  }
  if (!graph) return std::nullopt;
  describe(source, cuts.front(), unit_cotangents, region);
  region.count = static_cast<int>(cuts.size());
  Move move{eliminate_common_of_loops(std::move(*graph)), plan.regions};
  move.regions.push_back(std::move(region));
  return move;
}
std::optional<Move> formed(const Plan& plan, const Candidate& c, std::span<const LoopCut> cuts) {
  return formed(plan, c.graph(), cuts, c.unit);
}

// Returns the chunk of a loop beside sums of `bytes`. Chunks must take less memory than the sums
// did: otherwise a move with less work is as small.
std::int64_t beside_sums(const Plan& plan, const Graph& graph, const Region& region,
                         std::int64_t bytes, const MoveSink& sink) {
  const std::int64_t small =
      std::max<std::int64_t>(bytes / 2 * region.extent / std::max<std::int64_t>(plan.bytes, 1), 1);
  const auto even = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(small)));
  return std::min(first_chunk(graph, region, sink), even);
}

// Returns the region's loops without its large sums, which get loops along another dimension. The
// inputs of the sums are then computed twice. Chunks take less than a share of the sums. Returns
// nothing if there are no such sums.
std::optional<Move> formed_apart(const Plan& plan, const Candidate& c, std::int64_t share,
                                 const MoveSink& sink) {
  const std::optional<SumsApart> apart = sums_apart(c.graph(), c.region, plan.bytes / kLeastShare);
  if (!apart) return std::nullopt;
  const Graph& graph = apart->graph;
  std::vector<LoopCut> cuts;
  for (const Region* r : {&apart->region, &apart->copies}) {
    cuts.push_back(
        {*r, beside_sums(plan, graph, *r, apart->bytes / share, sink), new_group(graph)});
  }
  cuts[1].group += 's';
  std::optional<Graph> formed = form_loops(graph, cuts, cuts[0].group);
  if (!formed) return std::nullopt;
  Move move{eliminate_common_of_loops(std::move(*formed)), plan.regions};
  for (const LoopCut& cut : cuts) {
    ChunkedRegion& region = move.regions.emplace_back();
    describe(graph, cut, c.unit, region);
    region.group = cut.group;
  }
  return move;
}

// Returns the region's loops with one more loop for each further part of its large sums, or nothing
// if there are no such sums.
std::optional<Move> formed_in_parts(const Plan& plan, const Candidate& c, int parts,
                                    const MoveSink& sink) {
  const std::optional<SumsInParts> divided =
      sums_in_parts(c.graph(), c.region, parts, plan.bytes / kLeastPart);
  if (!divided) return std::nullopt;
  // The chunk takes about twice as much as a part.
  const std::int64_t sums = 4 * divided->bytes;
  const LoopCut cut{divided->region, beside_sums(plan, c.graph(), c.region, sums, sink)};
  return formed(plan, divided->graph, {&cut, 1}, c.unit);
}

// Proposes loops that do not hold the region's large sums. Returns false if the search takes no
// more.
bool propose_sums(const Plan& plan, const Candidate& c, MoveSink& sink) {
  bool apart = false;
  // A chunk may hold more than its share of the plan, whose loops are fused: then a smaller one.
  for (const std::int64_t share : {1, 4}) {
    std::optional<Move> move = formed_apart(plan, c, share, sink);
    if (!move) break;
    apart = true;
    if (!sink.consider(std::move(*move))) return false;
    if (sink.lowered()) break;
  }
  for (const int parts : kParts) {
    std::optional<Move> move = apart ? std::nullopt : formed_in_parts(plan, c, parts, sink);
    if (!move) break;
    if (!sink.consider(std::move(*move))) return false;
  }
  return true;
}

// Returns the loops without the products that contract their big 16-bit values, which run once
// after the loops. Returns nothing if there are no such products. On a GPU alone: a CPU's chunks
// stay in its caches for the products.
std::optional<Move> formed_before_products(const Plan& plan, const Candidate& c,
                                           std::vector<LoopCut> cuts) {
  for (LoopCut& cut : cuts) {
    std::optional<Region> rest = products_after(c.graph(), cut.region);
    if (!rest) return std::nullopt;
    cut.region = *std::move(rest);
  }
  return formed(plan, c, cuts);
}

// Returns the roles of values that are live at the peak, those with the most bytes first.
std::vector<Role> roles_at(const Plan& plan, const Peak& peak,
                           const std::vector<std::uint64_t>& roles) {
  std::map<std::uint64_t, std::size_t> place;
  std::vector<Role> list;
  for (const int b : peak.live) {
    const Buffer& buffer = plan.program.buffers[static_cast<std::size_t>(b)];
    if (buffer.node < 0) continue;
    const auto [at, is_new] =
        place.emplace(roles[static_cast<std::size_t>(buffer.node)], list.size());
    if (is_new) list.emplace_back();
    list[at->second].nodes.push_back(buffer.node);
    list[at->second].bytes += buffer.bytes;
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const Role& a, const Role& b) { return a.bytes > b.bytes; });
  // Small values may still lead to a large region, so a few roles are always kept.
  while (list.size() > kLeastRoles && list.back().bytes * kLeastShare < plan.bytes) list.pop_back();
  return list;
}

// Returns whether an earlier candidate's region contains the value with this cut.
bool covered(const std::vector<Candidate>& candidates, int node, const Split& split) {
  return std::any_of(candidates.begin(), candidates.end(), [&](const Candidate& c) {
    const Split* s = c.unit ? nullptr : c.region.split({node, 0});
    return s != nullptr && *s == split;
  });
}

}  // namespace

void propose_loops(const Plan& plan, const Peak& peak, MoveSink& sink) {
  const std::vector<std::uint64_t> roles = roles_of(plan.graph);
  const auto source = std::make_shared<const Source>(&plan.graph);
  std::vector<Candidate> candidates;
  int tried = 0;
  for (const Role& role : roles_at(plan, peak, roles)) {
    const int node = role.nodes.front();
    const Op op = plan.graph.node(node).op;
    if (op == Op::loop || op == Op::head) {
      sink.refuse(node, op == Op::loop ? "it is the result of a loop" : "the head engine makes it");
      continue;
    }
    if (tried >= (sink.spacious() ? kMostRoles : kMostRoles / 2)) break;
    if (!sink.begin(node, roles[static_cast<std::size_t>(node)])) continue;
    ++tried;
    std::vector<int> alike;
    for (int id = 0; id < plan.graph.size(); ++id) {
      if (id != node &&
          roles[static_cast<std::size_t>(id)] == roles[static_cast<std::size_t>(node)])
        alike.push_back(id);
    }
    bool any = false, too_long = false, more = true;
    for (const Split& split : splits_of(plan.graph.node(node).results[0])) {
      if (!more || (!sink.spacious() && any && sink.lowered())) break;
      if (covered(candidates, node, split)) {
        any = true;
        continue;
      }
      Candidate c = candidate_of(source, {node, 0}, split, alike);
      if (c.region.nodes.empty() || c.region.extent < 2) continue;
      std::vector<LoopCut> cuts = cuts_of(c, first_chunk(c.graph(), c.region, sink));
      std::optional<Move> move = formed(plan, c, cuts);
      if (!move) {
        too_long = true;
        continue;
      }
      any = true;
      more = sink.consider(std::move(*move));
      if (more && sink.spacious() && sink.chunks() == 0) {
        more = propose_sums(plan, c, sink);
        if (more && sink.target().most_group_columns() > 0) {
          if (move = formed_before_products(plan, c, cuts); move)
            more = sink.consider(std::move(*move));
        }
      }
      // Tries half of the regions, too: moves that cost work then cost half of it.
      if (more && cuts.size() > 3 && c.region.phases > 1) {
        if (move = formed(plan, c, std::span(cuts).first(cuts.size() / 2)); move)
          more = sink.consider(std::move(*move));
      }
      candidates.push_back(std::move(c));
    }
    if (!any)
      sink.refuse(node, too_long ? "loops would compute most of the program again and again"
                                 : "it cannot be cut along any dimension");
    if (!sink.end(node) || !more) return;
  }
}

}  // namespace logitless::ir

// Finds the nodes that run in a loop over chunks, and their phases.
//
// A region is grown around one big value. It contains the big values that can be cut along with it,
// and the small values that connect them, such as a row's log-sum-exp. It also contains the
// consumers of big values, whose small results are stored or merged over the chunks. The region
// ends at a conflict and at an operation that cannot be cut. The value there is computed in full,
// and the reason is recorded.
//
// Nodes that depend on a result of all chunks, such as a column sum or a squared loss, belong to a
// later phase. Each phase is a separate loop that recomputes big values.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "compiler/analysis/split.h"

namespace logitless::ir {

// The nodes of a region, and how each runs on a chunk. Iteration is in graph order after sort(),
// which must follow the last emplace().
class ChunkedNodes {
 public:
  using Entry = std::pair<int, Chunked>;
  ChunkedNodes() = default;
  ChunkedNodes(std::initializer_list<Entry> entries) {
    for (const auto& [node, how] : entries) emplace(node, how);
    sort();
  }

  bool contains(int node) const { return place(node) >= 0; }
  const Chunked& at(int node) const {
    return entries_[static_cast<std::size_t>(place(node))].second;
  }
  // Does nothing if the node is present.
  void emplace(int node, const Chunked& how);
  void sort();
  // Keeps the nodes with keep[node].
  void keep(const std::vector<bool>& keep);
  void clear();

  std::size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  auto rbegin() const { return entries_.rbegin(); }
  auto rend() const { return entries_.rend(); }

 private:
  std::vector<Entry> entries_;
  std::vector<int> place_;  // index in entries_ by node; absent: -1, or past the end

  int place(int node) const {
    const auto at = static_cast<std::size_t>(node);
    return at < place_.size() ? place_[at] : -1;
  }
  void number();
};

struct Region {
  Value seed;
  std::int64_t extent = 0;  // of the axis
  ChunkedNodes nodes;       // without constants, which every reader makes itself
  std::vector<int> phase;   // by node of the graph, up to the last one inside
  int phases = 0;           // loops
  // Big values that had to be computed in full, and the reasons.
  std::vector<std::string> boundaries;

  bool inside(int node) const { return nodes.contains(node); }
  // Returns null unless the value exists chunk by chunk.
  const Split* split(Value v) const;
};

// Returns whether a value has at least half of the seed's elements.
inline bool is_big(std::int64_t elements, std::int64_t seed) { return 2 * elements >= seed; }
// Returns whether a value has a few numbers for each row of the seed, or for each column if those
// are cut. Tiny values may connect big values.
bool is_tiny(std::int64_t elements, const Graph& graph, Value seed, const Split& split);

// Grows the region around `seed` with this cut. It has no nodes if the seed cannot be cut.
Region grow_region(const Graph& graph, Value seed, const Split& split);
// Reuses graph.users() when many regions are grown.
Region grow_region(const Graph& graph, const Lists<int>& users, Value seed, const Split& split);

// Returns whether operand i of an inside node comes from the same chunk's computation.
bool flows(const Region& region, const Graph& graph, int node, std::size_t i);

// Replaces scalars that later phases wait for although the region depends on them linearly. The
// gradient is then computed for a scalar of 1 and multiplied after the loop. Returns the rewritten
// graph, or nothing without such a scalar.
struct UnitCotangents {
  Graph graph;
  Value seed;               // the region's seed in the new graph
  std::vector<int> copies;  // by node of the old graph: its counterpart in the new graph; -1: none
};
std::optional<UnitCotangents> unit_cotangents(const Graph& graph, const Region& region);

}  // namespace logitless::ir

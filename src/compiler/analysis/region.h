// Which nodes run in a loop over chunks, and in which of its phases.
//
// A region is grown around one big value. It holds the big values that can be cut along with it,
// small ones that lead from one of them to another (a row's log-sum-exp), and whatever consumes a
// big value: its result is small, and is kept or merged over the chunks. A conflict or an operation
// that cannot be cut ends the region there: the value is made whole, with the reason noted.
//
// What depends on a result of all chunks (a column's sum, a loss squared) is of a later phase. Each
// phase is a loop of its own that computes big values again.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "compiler/analysis/split.h"

namespace logitless::ir {

// Nodes of a graph and how each of them runs on a chunk. Iterated over in their order, once sort()
// has been called after the last emplace().
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
  // A node that is there already stays as it is.
  void emplace(int node, const Chunked& how);
  void sort();
  // Keeps the nodes for which keep[node].
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
  std::vector<int> place_;  // of each node, in entries_; -1, or behind the end: not there

  int place(int node) const {
    const auto at = static_cast<std::size_t>(node);
    return at < place_.size() ? place_[at] : -1;
  }
  void number();
};

struct Region {
  Value seed;
  std::int64_t extent = 0;              // of the axis
  ChunkedNodes nodes;                   // none of nothing, which every reader makes itself
  std::vector<int> phase;               // of each node of the graph up to the last one inside
  int phases = 0;                       // loops
  std::vector<std::string> boundaries;  // big values that had to be whole, and why

  bool inside(int node) const { return nodes.contains(node); }
  // Not null where the value exists chunk by chunk.
  const Split* split(Value v) const;
};

// A value as large as half the seed, elements counted.
inline bool is_big(std::int64_t elements, std::int64_t seed) { return 2 * elements >= seed; }
// A few numbers for each row of the seed (or column, where those are cut): what may lead from one
// big value to another.
bool is_tiny(std::int64_t elements, const Graph& graph, Value seed, const Split& split);

// The region around `seed` cut so. Empty nodes when the seed itself cannot be cut.
Region grow_region(const Graph& graph, Value seed, const Split& split);
// The same with graph.users() at hand, where many are grown.
Region grow_region(const Graph& graph, const Lists<int>& users, Value seed, const Split& split);

// Whether operand i of a node inside is read chunk by chunk from the same chunk's computation.
bool flows(const Region& region, const Graph& graph, int node, std::size_t i);

// Scalars that later phases wait for, though everything inside depends on them linearly: a gradient
// is then computed for 1 and multiplied when the loop is done. Returns the graph rewritten so, or
// nothing where there is no such scalar.
struct UnitTangents {
  Graph graph;
  Value seed;               // of the region, in it
  std::vector<int> copies;  // by node of the old graph: the one that is now its like; -1: none
};
std::optional<UnitTangents> unit_tangents(const Graph& graph, const Region& region);

}  // namespace logitless::ir

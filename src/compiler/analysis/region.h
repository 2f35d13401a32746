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

#include <map>
#include <string>
#include <vector>

#include "compiler/analysis/split.h"

namespace logitless::ir {

struct Region {
  Value seed;
  std::int64_t extent = 0;              // of the axis
  std::map<int, Chunked> nodes;         // by node; none of nothing, which every reader makes itself
  std::vector<int> phase;               // of each node of the graph, inside or not
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
Region grow_region(const Graph& graph, const std::vector<std::vector<int>>& users, Value seed,
                   const Split& split);

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

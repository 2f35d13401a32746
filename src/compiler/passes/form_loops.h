// Turns regions into loops, one for each phase.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "compiler/analysis/region.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// A region, and the most elements of its axis in a chunk.
struct LoopCut {
  Region region;
  std::int64_t chunk = 1;
  std::string group = {};  // of its loops; empty: the common one
};

// Moves the nodes of the region into the bodies of loops over chunks of at most `chunk` elements.
// Results that later phases read are stored if they are small and recomputed if they are big. Sums
// over the chunks are fp32 (f64 for f64). Sizes in the body contain the loop's symbol, so the graph
// does not grow with the number of chunks. Expects bound sizes; keeps results and their types.
Graph form_loops(const Graph& graph, const Region& region, std::int64_t chunk);

// Forms loops of several disjoint regions at once. The loops belong to `group`: their symbols are
// "group", "group_1", "group_2" and so on. Loops that compute the same from other inputs, like
// those of a network's layers, share one body.
//
// Returns nothing if loops of two regions would wait for each other. The same holds if phases that
// recompute each other would make the program many times as long.
std::optional<Graph> form_loops(const Graph& graph, std::span<const LoopCut> cuts,
                                const std::string& group);

// group_of() returns the group of a loop's symbol, new_group() a group without loops in the graph.
std::string group_of(const std::string& symbol);
std::string new_group(const Graph& graph);

// Sets the chunks of a group's loops to `chunk` elements.
Graph resize_loops(const Graph& graph, const std::string& group, std::int64_t chunk);

}  // namespace logitless::ir

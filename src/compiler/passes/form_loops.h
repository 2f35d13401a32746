// Regions become loops: one for each phase.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "compiler/analysis/region.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// A region, and how many elements of its axis a chunk has at most.
struct LoopCut {
  Region region;
  std::int64_t chunk = 1;
  std::string group = {};  // of its loops, where that is not the one of all
};

// The graph with the nodes of the region moved into the bodies of real loops over chunks of at most
// `chunk` elements of the axis. Results of a phase that later ones read are kept when they are not
// big, and computed again when they are. Sums over the chunks run in fp32 (f64 of f64). The body's
// sizes hold the symbol of the loop, so the graph does not grow with the number of chunks.
// Expects bound sizes; keeps results and their types.
Graph form_loops(const Graph& graph, const Region& region, std::int64_t chunk);

// The same of several regions at once; no node is in two of them. The loops are of group `group`:
// their symbols are "group", "group_1", "group_2" and so on. Loops that compute the same of other
// inputs, as those of a network's layers, share one body. Nothing where loops of two regions would
// wait for each other, or phases that compute each other again would make a program of many times
// the length.
std::optional<Graph> form_loops(const Graph& graph, std::span<const LoopCut> cuts,
                                const std::string& group);

// What a loop's symbol says of its group, and a group that no loop of the graph has.
std::string group_of(const std::string& symbol);
std::string new_group(const Graph& graph);

// The graph with chunks of `chunk` elements in the loops of a group; nothing else changes.
Graph resize_loops(const Graph& graph, const std::string& group, std::int64_t chunk);

}  // namespace logitless::ir

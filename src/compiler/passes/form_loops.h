// A region becomes loops: one for each phase.
#pragma once

#include "compiler/analysis/region.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// The graph with the nodes of the region moved into the bodies of real loops over chunks of at most
// `chunk` elements of the axis. Results of a phase that later ones read are kept when they are not
// big, and computed again when they are. Sums over the chunks run in fp32 (f64 of f64). The body's
// sizes hold the symbol of the loop, so the graph does not grow with the number of chunks.
// Expects bound sizes; keeps results and their types.
Graph form_loops(const Graph& graph, const Region& region, std::int64_t chunk);

// Without the nodes that no result depends on; parameters stay.
Graph eliminate_dead(const Graph& graph);
// Equal operations on equal operands become one.
Graph eliminate_common(const Graph& graph);
// Only where one loop reads two equal values: copies that were made to be far apart are now
// together.
Graph eliminate_common_of_loops(const Graph& graph);

}  // namespace logitless::ir

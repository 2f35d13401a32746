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

}  // namespace logitless::ir

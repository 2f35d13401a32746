// Loops, values computed again, or both: what a budget is met with.
#pragma once

#include "compiler/choose_chunks.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// The choice of a ChunkSearch, or where a budget asks for more than costs nothing, of that and of
// values computed again (recompute_within.h) beside loops that cost nothing the fastest within the
// budget, of two as fast the smaller. Where none is within it, loops are looked for around values
// that are computed again, too, and what is over the budget has the fewest bytes.
ChunkChoice choose_within(const Graph& graph, const ChunkRequest& request);

}  // namespace logitless::ir

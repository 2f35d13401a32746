// Meets a budget by loops, by recomputing values, or by both.
#pragma once

#include "compiler/choose_chunks.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns the choice of a ChunkSearch where it costs no time. A budget that asks for more also
// considers recomputed values (recompute_within.h) beside loops that cost nothing.
//
// The result is the fastest plan within the budget, of two equally fast ones the smaller. Where no
// plan is within the budget, loops around recomputed values are searched for, too. Of plans over
// the budget the one with the fewest bytes is returned.
ChunkChoice choose_within(const Graph& graph, const ChunkRequest& request);

}  // namespace logitless::ir

// How much is computed again by products for a budget: decided by the memory plan itself.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/choose_chunks.h"
#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

struct RecomputeChoice {
  Graph graph;
  Program program;
  int values = 0;              // results of products and the like that are made once more
  std::int64_t given_up = 0;   // bytes that lived over the peak and no longer do
  std::int64_t before = 0;     // bytes of the arena's values
  double multiply_adds = 0.0;  // more than the graph's
};

// Of the choices of passes/recompute_segments.h the one of the least work whose values take at most
// `budget` bytes, or the fewest bytes found where none does; none where that is not fewer than
// `program`, which is the graph lowered. Lowers a few choices, as many as it takes to correct what
// is expected of them. `added` and `bodies` are as lower() takes them.
std::optional<RecomputeChoice> recompute_within(const Graph& graph, const Program& program,
                                                const Target& target, std::int64_t budget,
                                                const std::vector<bool>& added,
                                                LoweredBodies* bodies = nullptr);

// The choice of a ChunkSearch, and where the budget is met by no loops that cost nothing: loops
// that cost nothing, then what recompute_within() says, then more loops if the budget asks for
// them. Of both the one within the budget, of two within it the one of less work, of none the one
// of fewer bytes.
ChunkChoice choose_within(const Graph& graph, const ChunkRequest& request);

}  // namespace logitless::ir

// Which regions become loops, along what, in how many chunks: the search's plan for a budget.
#pragma once

#include <string>
#include <vector>

#include "compiler/search/plan.h"
#include "logitless/compiler.h"

namespace logitless::ir {

struct ChunkRequest {
  const Target& target;
  std::int64_t budget = 0;       // bytes; 0: nothing is computed twice, and little time lost
  bool with_scratch = false;     // of the arena; false: of values
  bool explore = false;          // search for what a budget would bring, too
  std::int64_t chunks = 0;       // of every loop; 0: chosen
  std::vector<bool> added = {};  // as lower() takes it
};

// What is computed again by products and the like (recompute_within.h).
struct RecomputedValues {
  int values = 0;                      // 0: nothing
  std::int64_t given_up = 0;           // bytes that lived over the peak and no longer do
  std::int64_t before = 0, after = 0;  // bytes of the arena
  double extra_work = 0.0;             // multiply-adds more, as a fraction of all
};

struct ChunkChoice {
  Graph graph;
  Program program;
  std::vector<ChunkedRegion> regions;
  std::vector<std::string> refusals;  // big values at the peak that no loop was made of, and why
  std::vector<PlanPoint> plans;       // the front of bytes and seconds
  std::string search;                 // how many programs were planned, and what bounded that
  RecomputedValues recomputed = {};
};

// Expects bound sizes. Never a higher peak than without loops. A larger budget never gets a plan
// that one for a smaller budget beats.
ChunkChoice choose_chunks(const Graph& graph, const ChunkRequest& request);

}  // namespace logitless::ir

// Which regions become loops, along what, in how many chunks: the search's plan for a budget.
#pragma once

#include <string>
#include <vector>

#include "compiler/search/search.h"
#include "logitless/compiler.h"

namespace logitless::ir {

struct ChunkRequest {
  const Target& target;
  std::int64_t budget = 0;          // bytes; 0: nothing is computed twice, and little time lost
  bool with_scratch = false;        // of the arena; false: of values
  bool explore = false;             // search for what a budget would bring, too
  std::int64_t chunks = 0;          // of every loop; 0: chosen
  std::vector<bool> added = {};     // as lower() takes it
  LoweredBodies* bodies = nullptr;  // as lower() takes it
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
class ChunkSearch {
 public:
  ChunkSearch(const Graph& graph, const ChunkRequest& request);
  // What the request asks for.
  ChunkChoice choice() const;
  // What a request without a budget would get.
  ChunkChoice free_choice() const;
  // That, and the plans with the same loops and another workspace of heads; the fastest first.
  std::vector<ChunkChoice> bases() const;
  // Of the graph without loops.
  double multiply_adds() const { return found_.plans.front()->work; }

 private:
  const ChunkRequest request_;
  const SearchResult found_;
  ChunkChoice made_of(std::size_t chosen, bool free) const;
};

}  // namespace logitless::ir

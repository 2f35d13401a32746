// Chooses the regions that become loops, the dimensions they are chunked along and the number of
// chunks: the best plan of the search for a budget.
#pragma once

#include <string>
#include <vector>

#include "compiler/search/search.h"
#include "logitless/compiler.h"

namespace logitless::ir {

struct ChunkRequest {
  const Target& target;
  std::int64_t budget = 0;          // bytes; 0: nothing is recomputed, and little time is lost
  bool with_scratch = false;        // the budget bounds the arena; false: values alone
  bool explore = false;             // also search for plans that a budget would allow
  std::int64_t chunks = 0;          // of every loop; 0: chosen
  std::vector<bool> added = {};     // argument of lower()
  LoweredBodies* bodies = nullptr;  // argument of lower()
};

// Values that are recomputed by matrix products and other expensive operations
// (recompute_within.h).
struct RecomputedValues {
  int values = 0;                      // 0: nothing
  std::int64_t given_up = 0;           // bytes that were live at the peak and no longer are
  std::int64_t before = 0, after = 0;  // bytes of the arena
  double extra_work = 0.0;             // additional multiply-adds as a fraction of all
};

struct ChunkChoice {
  Graph graph;
  Program program;
  std::vector<ChunkedRegion> regions;
  std::vector<std::string> refusals;  // big values at the peak without a loop, and the reasons
  std::vector<PlanPoint> plans;       // the Pareto front of bytes and seconds
  std::string search;                 // the number of plans of the search, and its bound
  RecomputedValues recomputed = {};
};

// Searches once and chooses plans for requests. Sizes must be bound. The peak is never higher than
// without loops. A larger budget never gets a plan that is beaten by the plan of a smaller budget.
class ChunkSearch {
 public:
  ChunkSearch(const Graph& graph, const ChunkRequest& request);
  // Returns the choice for the request's budget.
  ChunkChoice choice() const;
  // Returns the choice for a request without a budget.
  ChunkChoice free_choice() const;
  // Returns the free choice and the plans with the same loops and another workspace of heads, the
  // fastest first.
  std::vector<ChunkChoice> bases() const;
  // Returns the multiply-adds of the graph without loops.
  double multiply_adds() const { return found_.plans.front()->work; }

 private:
  const ChunkRequest request_;
  const SearchResult found_;
  ChunkChoice made_of(std::size_t chosen, bool free) const;
};

// --- choose_within.cpp: meets a budget by loops, by recomputing values, or by both

// Returns the choice of a ChunkSearch where it costs no time. A budget that asks for more also
// considers recomputed values (recompute_within.h) beside loops that cost nothing.
//
// The result is the fastest plan within the budget, of two equally fast ones the smaller. Where no
// plan is within the budget, loops around recomputed values are searched for, too. Of plans over
// the budget the one with the fewest bytes is returned.
ChunkChoice choose_within(const Graph& graph, const ChunkRequest& request);

}  // namespace logitless::ir

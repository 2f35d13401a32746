// The search for programs of less memory. It starts at the peak and applies moves until it has a
// Pareto front of bytes and predicted seconds.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "compiler/plan/lowered_bodies.h"
#include "compiler/search/plan.h"

namespace logitless::ir {

struct SearchRequest {
  const Target& target;
  std::int64_t chunks = 0;       // of every loop; 0: chosen
  std::vector<bool> added = {};  // argument of lower()
  // False: only plans that recompute nothing and are predicted to take little more time.
  bool paid = true;
  // Compares plans by the scratch of kernels, too. That depends on threads, so plans and the bits
  // of sums then depend on them as well.
  bool with_scratch = false;
  LoweredBodies* bodies = nullptr;  // argument of lower()
};

struct SearchResult {
  // The first plan is the graph without moves, `free` is the one to take without a budget. A plan
  // that another one beats in bytes, seconds and work has no graph and no program.
  std::vector<std::unique_ptr<Plan>> plans;
  std::size_t free = 0;
  int planned = 0;       // plans that were lowered
  bool bounded = false;  // moves were left when the capacity was used up
  int capacity = 0;      // the most plans
};

// Does not depend on a budget, so a larger budget never gets a worse plan. Returns all plans of the
// free search and, if `paid`, those of the search that continues from there.
SearchResult search(const Graph& graph, const SearchRequest& request);

}  // namespace logitless::ir

// The search for programs that take less memory: from the peak, by moves, to a front of bytes and
// predicted seconds.
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
  std::vector<bool> added = {};  // as lower() takes it
  // False: only plans that compute nothing twice and are predicted to take little more time.
  bool paid = true;
  // Whether plans are compared by the scratch of kernels, too, which depends on threads: so do then
  // the plans, and the bits of sums.
  bool with_scratch = false;
  LoweredBodies* bodies = nullptr;  // as lower() takes it
};

struct SearchResult {
  // All that were kept: the first is the graph as it came, `free` the one to take without a budget.
  // A plan that another one beats in bytes, seconds and work has no graph and no program.
  std::vector<std::unique_ptr<Plan>> plans;
  std::size_t free = 0;
  int planned = 0;       // lowered and planned
  bool bounded = false;  // there were moves left, and no room for them
  int room = 0;          // for so many plans
};

// Does not depend on a budget, so that a larger one never gets a worse plan. What it finds are
// all plans of the free search and, where `paid`, those of the search that goes on from there.
SearchResult search(const Graph& graph, const SearchRequest& request);

}  // namespace logitless::ir

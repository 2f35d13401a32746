// Plans whose budget is a hint.
#pragma once

#include <cstddef>

#include "logitless/error.h"
#include "logitless/plan.h"

namespace logitless {

// Returns plan(request) for the request's budget, above 0, or for the least of its doubles that a
// plan fits in. Throws the planner's error if none does.
template <typename Plan>
LossPlan plan_from_hint(PlanRequest request, const Plan& plan) {
  constexpr std::size_t kMost = std::size_t{1} << 46;
  for (;; request.memory_budget *= 2) {
    try {
      return plan(request);
    } catch (const InvalidArgument&) {
      if (request.memory_budget > kMost) throw;
    }
  }
}

}  // namespace logitless

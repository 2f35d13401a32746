#include "head/plan/default_plan.h"

#include <algorithm>

#include "core/check.h"
#include "head/plan_sizes.h"

namespace logitless {
namespace {

// What is asked for exactly enough: the bytes, or a 64th of them.
constexpr std::size_t kExact = 1_MiB;

// The candidates as they are with all of the limit, but for the kind that was taken.
void keep_reasons(const LossPlan& at_limit, LossPlan& chosen, double slack) {
  for (PlanCandidate& c : chosen.candidates) {
    if (c.kind == chosen.kind) continue;
    for (const PlanCandidate& other : at_limit.candidates) {
      if (other.kind == c.kind) c = other;
    }
    if (c.kind == at_limit.kind)
      c.reason = concat("not worth the memory: less than ", slack * 100.0, " % faster");
  }
}

}  // namespace

std::size_t default_limit(const HeadShape& shape, bool far) {
  const double logits = 4.0 * static_cast<double>(shape.tokens) * static_cast<double>(shape.vocab);
  return std::max(far ? 512_MiB : 16_MiB, static_cast<std::size_t>(std::min(logits / 4.0, 1e18)));
}

LossPlan default_plan(std::size_t limit, double slack,
                      const std::function<LossPlan(std::size_t)>& plan) {
  const std::size_t most = limit + limit / 5;  // for a dense plan in one chunk
  const auto allows = [&](const LossPlan& p) {
    return p.workspace_bytes() <= (is_dense_in_one_chunk(p) ? most : limit);
  };
  LossPlan fastest = plan(most);
  if (!allows(fastest)) fastest = plan(limit);
  LossPlan chosen = fastest;
  // More memory is hardly ever slower, so the least that will do is found by halving. A plan may
  // take less than one for a smaller budget, since it takes the least that is about as fast.
  std::size_t low = 0;
  while (allows(chosen) && chosen.workspace_bytes() > low &&
         chosen.workspace_bytes() - low > std::max(kExact, chosen.workspace_bytes() / 64)) {
    const std::size_t middle = low + (chosen.workspace_bytes() - low) / 2;
    LossPlan less = plan(middle);
    if (less.workspace_bytes() <= middle && allows(less) &&
        less.predicted_seconds <= (1.0 + slack) * fastest.predicted_seconds) {
      chosen = std::move(less);
    } else {
      low = middle;
    }
  }
  keep_reasons(fastest, chosen, slack);
  chosen.memory_budget = 0;
  chosen.default_limit = !allows(chosen) ? 0 : chosen.workspace_bytes() <= limit ? limit : most;
  return chosen;
}

}  // namespace logitless

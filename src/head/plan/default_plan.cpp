#include "head/plan/default_plan.h"

#include <algorithm>

#include "core/check.h"
#include "head/plan_sizes.h"

namespace logitless {
namespace {

// The bisection over bytes stops at this resolution, with a budget and without one, or at 1/64 of
// the workspace.
constexpr std::size_t kExact = 64_KiB;
constexpr std::size_t kExactDefault = 1_MiB;

std::size_t logits_bytes(const HeadShape& shape) {
  const double bytes = 4.0 * static_cast<double>(shape.tokens) * static_cast<double>(shape.vocab);
  return static_cast<std::size_t>(std::min(bytes, 1e18));
}

// Finds the smallest acceptable plan by bisection, since more memory is hardly ever slower. A plan
// may be smaller than one for a smaller budget, because each takes the smallest sizes that are
// about as fast.
template <typename Takes>
LossPlan least_of(LossPlan chosen, std::size_t exact, const Takes& takes,
                  const std::function<LossPlan(std::size_t)>& plan) {
  std::size_t low = 0;
  while (chosen.workspace_bytes() > low &&
         chosen.workspace_bytes() - low > std::max(exact, chosen.workspace_bytes() / 64)) {
    const std::size_t middle = low + (chosen.workspace_bytes() - low) / 2;
    LossPlan less = plan(middle);
    if (less.workspace_bytes() <= middle && takes(less)) {
      chosen = std::move(less);
    } else {
      low = middle;
    }
  }
  return chosen;
}

}  // namespace

void keep_reasons(const LossPlan& fastest, LossPlan& chosen, double slack) {
  for (PlanCandidate& c : chosen.candidates) {
    if (c.kind == chosen.kind) continue;
    for (const PlanCandidate& other : fastest.candidates) {
      if (other.kind == c.kind) c = other;
    }
    if (c.kind == fastest.kind)
      c.reason = concat("not worth the memory: less than ", slack * 100.0, " % faster");
  }
}

std::size_t budget_ceiling(const HeadShape& shape, bool far, bool on_cpu, std::size_t budget) {
  return std::min(budget, std::max(default_limit(shape, far, on_cpu), logits_bytes(shape)));
}

LossPlan least_worth_its_time(const LossPlan& fastest, double best_seconds,
                              const std::function<LossPlan(std::size_t)>& plan) {
  const auto takes = [&](const LossPlan& p) {
    const double longer = p.predicted_seconds / fastest.predicted_seconds - 1.0;
    const double saved = 1.0 - static_cast<double>(p.workspace_bytes()) /
                                   static_cast<double>(fastest.workspace_bytes());
    return p.predicted_seconds <= (1.0 + kBudgetSlack) * best_seconds &&
           saved >= kBytesForTime * longer;
  };
  return least_of(fastest, kExact, takes, plan);
}

std::size_t default_limit(const HeadShape& shape, bool far, bool on_cpu) {
  const std::size_t logits = logits_bytes(shape);
  const std::size_t least = on_cpu ? 16_MiB : std::clamp(logits, 16_MiB, 64_MiB);
  return std::max(far ? 512_MiB : least, logits / 4);
}

LossPlan default_plan(std::size_t limit, double slack,
                      const std::function<LossPlan(std::size_t)>& plan) {
  const std::size_t most = limit + limit / 5;  // limit of a dense plan in one chunk
  const auto allows = [&](const LossPlan& p) {
    return p.workspace_bytes() <= (is_dense_in_one_chunk(p) ? most : limit);
  };
  LossPlan fastest = plan(most);
  if (!allows(fastest)) fastest = plan(limit);
  const auto takes = [&](const LossPlan& p) {
    return allows(p) && p.predicted_seconds <= (1.0 + slack) * fastest.predicted_seconds;
  };
  LossPlan chosen = allows(fastest) ? least_of(fastest, kExactDefault, takes, plan) : fastest;
  keep_reasons(fastest, chosen, slack);
  chosen.memory_budget = 0;
  chosen.default_limit = !allows(chosen) ? 0 : chosen.workspace_bytes() <= limit ? limit : most;
  return chosen;
}

}  // namespace logitless

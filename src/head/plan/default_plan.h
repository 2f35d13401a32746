// The trade of memory for speed: the plan of a request without a memory budget, and the plan below
// the ceiling of a budget.
#pragma once

#include <cstddef>
#include <functional>

#include "logitless/bytes.h"
#include "logitless/plan.h"

namespace logitless {

// Returns the plan with the least workspace within `slack` of the best predicted time, among plans
// of at most `limit` bytes. A dense plan in one chunk, which keeps no sums between chunks, may take
// a fifth more. Returns the smallest plan if none is that small.
//
// `plan(budget)` returns the fastest plan that fits, or the smallest if none does.
LossPlan default_plan(std::size_t limit, double slack,
                      const std::function<LossPlan(std::size_t)>& plan);

// Returns a quarter of the fp32 logits, at least 16 MiB: a default should take clearly less memory
// than logits, and small problems have little to save. On a GPU it is at least all of the logits up
// to 64 MiB: small chunks would take several times as long there. If the far field is allowed, it
// is at least 512 MiB, because centroids and sums of d_hidden do not shrink with the logits.
std::size_t default_limit(const HeadShape& shape, bool far, bool on_cpu);

// Slack of a default's time. It is smaller for a vocabulary sharded over GPUs, which are used for
// speed.
inline double default_slack(const HeadFeatures& features, bool on_cpu) {
  return features.vocab_ranks > 0 && !on_cpu ? 0.01 : 0.03;
}

// With a budget, the largest loss of predicted time that less workspace is worth, and the relative
// workspace saved per relative time lost. Compiled programs use the same.
inline constexpr double kBudgetSlack = 0.01;
inline constexpr double kBytesForTime = 10.0;

// With a budget, a head of so few logits takes the default plan if that is smaller and at most this
// fraction slower.
inline constexpr std::size_t kFewLogits = 64_MiB;
inline constexpr double kFewLogitsSlack = 0.06;

// Returns the workspace that a plan under a budget may use: at most the fp32 logits or the
// default's limit, whichever is larger.
std::size_t budget_ceiling(const HeadShape& shape, bool far, bool on_cpu, std::size_t budget);

// Returns the plan with the least workspace that is worth its time compared to `fastest`, whose
// time is best_seconds or slightly more.
//
// `plan(budget)` returns the fastest plan that fits, or a larger one if none does.
LossPlan least_worth_its_time(const LossPlan& fastest, double best_seconds,
                              const std::function<LossPlan(std::size_t)>& plan);

// Replaces the candidates of `chosen`, except that of its kind, by those of `fastest`, which had
// all of the memory.
void keep_reasons(const LossPlan& fastest, LossPlan& chosen, double slack);

}  // namespace logitless

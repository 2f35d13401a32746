// How much memory a plan's speed is worth: the plan of a request that names no memory budget, and
// what one that does takes below it.
#pragma once

#include <cstddef>
#include <functional>

#include "logitless/bytes.h"
#include "logitless/plan.h"

namespace logitless {

// The least workspace within `slack` of the best predicted time among plans of at most
// `limit` bytes, or a fifth more for a dense plan in one chunk, which has no sums to put away
// between chunks; the least plan where none is that small.
//
// plan(budget): the fastest plan that fits, or the least one where none does.
LossPlan default_plan(std::size_t limit, double slack,
                      const std::function<LossPlan(std::size_t)>& plan);

// A quarter of the fp32 logits, 16 MiB at least: who asks for no logits expects to take less memory
// than they do, and small problems have little to save. 512 MiB at least for those who allow the
// far field, whose centroids and sums of d_hidden do not shrink with the logits.
std::size_t default_limit(const HeadShape& shape, bool far);

// Of words over a GPU's ranks it is less: several GPUs are taken for their speed.
inline double default_slack(const HeadFeatures& features, bool on_cpu) {
  return features.word_ranks > 0 && !on_cpu ? 0.01 : 0.03;
}

// Under a budget: the most of the best predicted time that less workspace is worth, and what part
// of the workspace each such part of the time must save, as in compiled programs.
inline constexpr double kBudgetSlack = 0.01;
inline constexpr double kBytesForTime = 10.0;

// Heads of so few logits take under a budget what they take without one, where that is less and
// no slower than this beside the plan of the budget.
inline constexpr std::size_t kFewLogits = 64_MiB;
inline constexpr double kFewLogitsSlack = 0.06;

// The workspace that a budget may be used for: at most the fp32 logits, or what a default may take
// where these are less.
std::size_t budget_ceiling(const HeadShape& shape, bool far, std::size_t budget);

// The least workspace that is worth its time beside `fastest`, whose time is best_seconds or a
// little more.
//
// plan(budget): the fastest plan that fits, or one of more bytes where none does.
LossPlan least_worth_its_time(const LossPlan& fastest, double best_seconds,
                              const std::function<LossPlan(std::size_t)>& plan);

// The candidates of `chosen` as they are with all of the memory that `fastest` had, but for the
// kind that was taken.
void keep_reasons(const LossPlan& fastest, LossPlan& chosen, double slack);

}  // namespace logitless

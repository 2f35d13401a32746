// The plan of a request that names no memory budget.
#pragma once

#include <cstddef>
#include <functional>

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

}  // namespace logitless

// Chooses plans of a program's heads by their workspace.
#pragma once

#include <cstdint>

#include "logitless/plan.h"

namespace logitless::ir {

// Returns the fastest plan within `bytes`, or within the least power of two times `bytes` that any
// plan fits into.
LossPlan plan_within(const HeadShape& shape, const HeadFeatures& features, PlanRequest request,
                     std::int64_t bytes);

// Returns the dense plan, which recomputes nothing, with an eighth of the logits' bytes and at most
// `most`.
LossPlan plan_without_limit(const HeadShape& shape, const HeadFeatures& features,
                            PlanRequest request, std::int64_t most);

}  // namespace logitless::ir

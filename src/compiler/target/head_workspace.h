// Plans of a program's heads by what their workspace may take.
#pragma once

#include <cstdint>

#include "logitless/plan.h"

namespace logitless::ir {

// The fastest plan within `bytes`, or within the least power of two times it that one fits into.
LossPlan plan_within(const HeadShape& shape, const HeadFeatures& features, PlanRequest request,
                     std::int64_t bytes);

// Nothing is computed twice: the dense plan, in an eighth of the logits' bytes and at most `most`.
LossPlan plan_without_limit(const HeadShape& shape, const HeadFeatures& features,
                            PlanRequest request, std::int64_t most);

}  // namespace logitless::ir

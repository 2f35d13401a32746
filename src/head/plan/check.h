// What a request may ask for.
#pragma once

#include "logitless/plan.h"

namespace logitless {

// Throws InvalidArgument, naming what is impossible.
void check_request(const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request);

// Of the far field's kinds: whether the request allows it.
bool allows(const PlanRequest& request, PlanKind kind);
bool allows_far(const PlanRequest& request);

}  // namespace logitless

// Checks of plan requests.
#pragma once

#include "logitless/plan.h"

namespace logitless {

// Throws InvalidArgument naming the impossible part of the request.
void check_request(const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request);

// Returns whether the request allows a far-field kind.
bool allows(const PlanRequest& request, PlanKind kind);
bool allows_far(const PlanRequest& request);

}  // namespace logitless

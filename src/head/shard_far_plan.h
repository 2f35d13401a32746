// Far-field plans of words that are spread over ranks: all ranks take one kind, or none does.
#pragma once

#include <optional>

#include "comm/digest.h"
#include "logitless/plan.h"

namespace logitless {

// What of the request must be the same on all ranks.
void say_far_field(const PlanRequest& request, PlanDigest& digest);
// Of the plan that a rank with so many rows of weight would take, which may be exact.
void say_far_plan(const LossPlan& plan, std::int64_t rows, PlanDigest& digest);

// Where the ranks' plans are not all of one far field, or all exact: the request that makes them
// so. The ranks with at least half as many words as the one with most decide: a far field that all
// of them would take, or exact plans.
std::optional<PlanRequest> common_request(const PlanRequest& request, const Agreement& plans);
// Why `plan` is not the far-field one that this rank would have taken.
void say_what_was_wanted(const LossPlan& wanted, LossPlan& plan);

// The plan with chunks, and its audit's, that all ranks have room for.
LossPlan with_common_audit(LossPlan plan, const Agreement& plans, DeviceKind device);

}  // namespace logitless

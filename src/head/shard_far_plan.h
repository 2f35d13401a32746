// Agreements of the ranks of a sharded vocabulary for their plans: the far field, which all take or
// none does, and the rates.
#pragma once

#include <optional>

#include "comm/digest.h"
#include "logitless/plan.h"

namespace logitless {

// Adds the fields of the request that must be equal on all ranks.
void describe_far_field(const PlanRequest& request, PlanDigest& digest);
// Adds the kind of the plan that a rank would choose, possibly exact, and its `rows` of weight.
void describe_far_plan(const LossPlan& plan, std::int64_t rows, PlanDigest& digest);

// Returns a request that makes the ranks' plans alike, or nothing if they are all of one far-field
// kind or all exact. Ranks with at least half as many rows as the largest decide: a far-field kind
// that all of them chose, or else exact plans.
std::optional<PlanRequest> common_request(const PlanRequest& request, const Agreement& plans);
// Appends to `plan` why it is not the far-field plan that this rank would have chosen.
void describe_request(const LossPlan& wanted, LossPlan& plan);

// Returns the plan with the audit's largest chunk that fits on all ranks.
LossPlan with_common_audit(LossPlan plan, const Agreement& plans, DeviceKind device);

// --- shard_card.cpp: the rates that ranks plan with

// Adds the rates of a rank's GPU. Ranks may have other cards, or other measured rates of the same.
void add_card(const DeviceLimits& device, PlanDigest& digest);
// Returns rank 0's rates, with which all ranks plan: other rates could choose other chunks.
GpuCard card_of_rank_0(const Agreement& agreed);

}  // namespace logitless

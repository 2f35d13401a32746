// Agreement of ranks on the rates that they plan with.
#pragma once

#include "comm/digest.h"
#include "logitless/context.h"

namespace logitless {

// Adds the rates of a rank's GPU. Ranks may have other cards, or other measured rates of the same.
void add_card(const DeviceLimits& device, PlanDigest& digest);
// Returns rank 0's rates, with which all ranks plan: other rates could choose other chunks.
GpuCard card_of_rank_0(const Agreement& agreed);

}  // namespace logitless

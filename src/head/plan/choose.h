// The choice of a plan. What is decided here holds on every device: which kinds there are, why one
// cannot serve, what a default is, which of those that fit is taken.
#pragma once

#include "logitless/plan.h"

namespace logitless {

// plan_head of this rank alone: features may be sharded, request.sharding is not looked at.
LossPlan plan_alone(const HeadShape& shape, const HeadFeatures& features,
                    const PlanRequest& request);
LossPlan plan_alone(const Context& context, const HeadShape& shape, const HeadFeatures& features,
                    const PlanRequest& request);

// A dense plan with all tokens in one chunk, on a GPU: of kept_head.h.
LossPlan plan_in_one_chunk(const HeadShape& shape, const HeadFeatures& features,
                           const PlanRequest& request);
LossPlan plan_in_one_chunk(const Context& context, const HeadShape& shape,
                           const HeadFeatures& features, const PlanRequest& request);

// A CPU's plan with room for this many threads, its audit's too. Chunks stay as they were planned,
// so that results do not depend on how many threads there are.
LossPlan with_threads(LossPlan plan, int threads);
// The same plan, of an exact kind on a GPU, with chunks of so many tokens, and its workspace.
LossPlan with_chunk(LossPlan plan, std::int64_t tokens, DeviceKind device);
// And one of weights that move, with pieces of so many rows of each rank.
LossPlan with_piece(LossPlan plan, std::int64_t rows, DeviceKind device);

// Who may set what a plan's user may not.
struct LossPlanAccess {
  static void set_workspace_bytes(LossPlan& plan, std::size_t bytes) {
    plan.workspace_bytes_ = bytes;
  }
};

}  // namespace logitless

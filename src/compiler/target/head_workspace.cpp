#include "compiler/target/head_workspace.h"

#include <algorithm>

#include "head/hinted_plan.h"

namespace logitless::ir {

LossPlan plan_within(const HeadShape& shape, const HeadFeatures& features, PlanRequest request,
                     std::int64_t bytes) {
  constexpr std::size_t kLeast = 1 << 16;
  request.memory_budget =
      std::max(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)), kLeast);
  return plan_from_hint(
      request, [&](const PlanRequest& within) { return plan_head(shape, features, within); });
}

LossPlan plan_without_limit(const HeadShape& shape, const HeadFeatures& features,
                            PlanRequest request, std::int64_t most) {
  constexpr std::int64_t kLogitsShare = 8;
  const LossPlan any = plan_head(shape, features, request);
  for (const PlanCandidate& c : any.candidates) {
    if (c.kind == PlanKind::dense && c.workspace_bytes > 0) request.kind = PlanKind::dense;
  }
  return plan_within(shape, features, request,
                     std::min(static_cast<std::int64_t>(any.logits_bytes()) / kLogitsShare, most));
}

}  // namespace logitless::ir

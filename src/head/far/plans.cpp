#include "head/far/plans.h"

namespace logitless {

const LossPlan& FarPlans::get(const Context& context, const HeadShape& shape,
                              const HeadFeatures& features, const PlanRequest& request,
                              const std::function<LossPlan(const PlanRequest&)>& make) {
  const bool exact = request.accuracy == Accuracy::exact;
  Slot& slot = slots_[exact ? 0 : request.audit_rows > 0 ? 2 : 1];
  HeadShape fits = slot.plan.shape;
  if (shape.tokens <= fits.tokens) fits.tokens = shape.tokens;
  if (!slot.plan.kernel.empty() && fits == shape && slot.plan.features == features &&
      slot.tau == request.tau)
    return slot.plan;
  slot.plan = make(request);
  slot.tau = request.tau;
  context.trace(slot.plan.explain());
  return slot.plan;
}

const Workspace& FarPlans::workspace_for(const Context& context, const LossPlan& plan) {
  if (workspace_ == nullptr || workspace_->bytes() < plan.workspace_bytes()) {
    workspace_.reset();  // before there are two
    workspace_ = std::make_unique<Workspace>(context, plan);
  }
  return *workspace_;
}

}  // namespace logitless

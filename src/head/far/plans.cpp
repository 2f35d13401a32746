#include "head/far/plans.h"

#include <algorithm>
#include <utility>

#include "head/shard_plan.h"

namespace logitless {

std::size_t FarPlans::slot_of(const PlanRequest& request) {
  return request.accuracy == Accuracy::exact ? 0 : request.audit_rows > 0 ? 2 : 1;
}

bool FarPlans::Slot::serves(const HeadShape& shape, const HeadFeatures& features,
                            const PlanRequest& request) const {
  if (plan.kernel.empty() || tau != request.tau || accuracy != request.accuracy) return false;
  // Fields that the ranks have agreed on while planning, independent of the request.
  HeadFeatures settled = features;
  settled.gathered_rows = plan.features.gathered_rows;
  settled.gathered_columns = plan.features.gathered_columns;
  settled.d_weight_strided = features.d_weight_strided || plan.features.d_weight_strided;
  if (plan.features != settled) return false;
  HeadShape fits = plan.shape;
  std::int64_t most = fits.tokens;
  if (const ShardAgreement* agreed = plan.agreement.get()) {
    fits.vocab = agreed->rows;
    fits.global_vocab = shape.global_vocab;
    most = agreed->tokens;
  }
  fits.tokens = shape.tokens;
  return shape.tokens <= most && fits == shape;
}

const LossPlan& FarPlans::get(const Context& context, const HeadShape& shape,
                              const HeadFeatures& features, const PlanRequest& request,
                              const std::function<LossPlan(const PlanRequest&)>& make) {
  Slot& slot = slots_[slot_of(request)];
  const bool of_kind = !request.kind.has_value() || slot.plan.kind == *request.kind;
  if (of_kind && slot.serves(shape, features, request)) return slot.plan;
  slot.plan = make(request);
  ++made_;
  slot.tau = request.tau;
  slot.accuracy = request.accuracy;
  context.trace(slot.plan.explain());
  return slot.plan;
}

unsigned FarPlans::missing(const HeadShape& shape, const HeadFeatures& features,
                           std::span<const PlanRequest> requests, const Sharding& sharding) const {
  unsigned kinds = 0;
  for (const PlanRequest& request : requests) {
    const Slot& slot = slots_[slot_of(request)];
    const bool there = slot.plan.agreement != nullptr &&
                       is_planned(*slot.plan.agreement, sharding) &&
                       slot.serves(shape, features, request);
    if (!there) kinds |= 1u << slot_of(request);
  }
  return kinds;
}

bool FarPlans::has_capacity() const {
  const auto fits = [&](const Slot& slot) {
    return slot.plan.kernel.empty() || slot.plan.workspace_bytes() <= workspace_->bytes();
  };
  return workspace_ != nullptr && std::all_of(slots_.begin(), slots_.end(), fits);
}

void FarPlans::drop(unsigned kinds) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if ((kinds >> i & 1u) != 0) slots_[i] = {};
  }
}

const Workspace& FarPlans::workspace_for(const Context& context, const LossPlan& plan) {
  if (workspace_ != nullptr && workspace_->bytes() >= plan.workspace_bytes()) return *workspace_;
  workspace_.reset();  // frees the old one first, so that both never exist
  if (allocate_ == nullptr) {
    workspace_ = std::make_unique<Workspace>(context, plan);
  } else {
    std::size_t most = plan.workspace_bytes();
    for (const Slot& slot : slots_)
      if (!slot.plan.kernel.empty()) most = std::max(most, slot.plan.workspace_bytes());
    workspace_ = std::make_unique<Workspace>(allocate_(most));
  }
  return *workspace_;
}

void FarPlans::borrow(std::function<Workspace(std::size_t bytes)> allocate) {
  workspace_.reset();
  allocate_ = std::move(allocate);
}

}  // namespace logitless

// The plans of one head under a FarController, and the workspace that they share.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "logitless/cross_entropy.h"

namespace logitless {

class FarPlans {
 public:
  // A plan for at least this shape, these features and exactly this request: the one there is, or
  // one that `make` makes. It stays until the next of its kind (exact, far, far with an audit).
  const LossPlan& get(const Context& context, const HeadShape& shape, const HeadFeatures& features,
                      const PlanRequest& request,
                      const std::function<LossPlan(const PlanRequest&)>& make);
  // Of calls with a sharding: the kinds of plan, one bit each, that this rank has to make for these
  // requests. Ranks make plans together, so that what one is to make all have to.
  unsigned missing(const HeadShape& shape, const HeadFeatures& features,
                   std::span<const PlanRequest> requests, const Sharding& sharding) const;
  void drop(unsigned kinds);
  // How many have been made.
  std::int64_t made() const { return made_; }
  // Whether the workspace there is serves all plans that there are.
  bool has_room() const;
  // Of the plan's size or larger; grows, which replaces it.
  const Workspace& workspace_for(const Context& context, const LossPlan& plan);

 private:
  struct Slot {
    LossPlan plan;
    // What it was made for: where the planner takes an exact one, the plan does not say.
    float tau = 0.0f;
    Accuracy accuracy = Accuracy::exact;
    bool serves(const HeadShape& shape, const HeadFeatures& features,
                const PlanRequest& request) const;
  };
  static std::size_t slot_of(const PlanRequest& request);
  std::array<Slot, 3> slots_;
  std::int64_t made_ = 0;
  std::unique_ptr<Workspace> workspace_;
};

}  // namespace logitless

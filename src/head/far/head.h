// The state of a FarFieldHead, shared by its own steps and the heads of compiled programs.
#pragma once

#include <optional>

#include "head/far/controller.h"
#include "head/far/plans.h"

namespace logitless {

struct FarFieldHead::State {
  FarController controller;
  FarPlans plans;
  // Statistics of the last step, if it succeeded. On a GPU, the plan locates them.
  std::optional<LossStatistics> last;
  LossPlan last_plan;
};

struct FarFieldAccess {
  using State = FarFieldHead::State;
  static State& of(FarFieldHead& head) { return *head.state_; }
  static const State& of(const FarFieldHead& head) { return *head.state_; }
};

}  // namespace logitless

// What a FarFieldHead holds, for the two that run steps under it: its own step, and the heads of
// compiled programs.
#pragma once

#include <optional>

#include "head/far/controller.h"
#include "head/far/plans.h"

namespace logitless {

struct FarFieldHead::State {
  FarController controller;
  FarPlans plans;
  // Of the last step, if it succeeded; on a GPU the plan tells where its statistics are.
  std::optional<LossStatistics> last;
  LossPlan last_plan;
};

struct FarFieldAccess {
  using State = FarFieldHead::State;
  static State& of(FarFieldHead& head) { return *head.state_; }
  static const State& of(const FarFieldHead& head) { return *head.state_; }
};

}  // namespace logitless

// What a FarFieldHead holds, for the two that run steps under it: its own step, and the heads of
// compiled programs.
#pragma once

#include "head/far_controller.h"
#include "head/far_plans.h"

namespace logitless {

struct FarFieldHead::State {
  FarController controller;
  FarPlans plans;
  LossPlan last_plan;  // of the last step, for its statistics
  LossStatistics last;
};

struct FarFieldAccess {
  using State = FarFieldHead::State;
  static State& of(FarFieldHead& head) { return *head.state_; }
  static const State& of(const FarFieldHead& head) { return *head.state_; }
};

}  // namespace logitless

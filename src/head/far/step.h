// A step under a controller, for its two callers: FarFieldHead::step, and the heads of compiled
// programs.
#pragma once

#include <optional>
#include <utility>

#include "head/far/controller.h"
#include "logitless/cross_entropy.h"

namespace logitless {

// Takes one step.
// - plan_of(FarStep) returns the plan for the controller's request.
// - run_far(FarStep) computes it and returns its statistics, or none if they are not known yet. An
//   audited step must return them.
// - run_dense() computes the step with the exact plan, overwriting the results of a far-field one.
// A call that throws is no step: the controller's state is restored.
template <typename PlanOf, typename RunFar, typename RunDense>
void take_far_step(FarController& controller, const OrderSource& source, bool may_repeat,
                   PlanOf&& plan_of, RunFar&& run_far, RunDense&& run_dense) {
  const LossPlan& audited = plan_of(FarStep{.far = true, .audit = true});
  if (source.sharding.vocab_group == nullptr) {  // else the ranks have checked it together
    controller.set_layout("", controller.has_layout(""));
    controller.require_head(source.weight.size(0), source.weight.size(1));
  }
  FarDecisions before = controller.before_step();
  try {
    const FarStep step = controller.begin(audited, source);
    if (step.far) {
      const std::optional<FarFieldStatistics> found = run_far(step);
      if (!found.has_value() || controller.accept(step, *found, may_repeat)) return;
    }
    run_dense();
  } catch (...) {
    controller.withdraw(std::move(before));
    throw;
  }
}

}  // namespace logitless

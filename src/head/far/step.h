// A step under a controller, for the two that take them: FarFieldHead::step, and the heads of
// compiled programs.
#pragma once

#include <optional>
#include <utility>

#include "head/far/controller.h"
#include "logitless/cross_entropy.h"

namespace logitless {

// plan_of(FarStep): the plan for the controller's request.
// run_far(FarStep): computes it; its statistics, or none where they are not known yet, which no
//   audited step may answer.
// run_dense(): computes the exact plan's step, over whatever a far one left.
// A call that throws is no step: what the controller had decided is as it was.
template <typename PlanOf, typename RunFar, typename RunDense>
void take_far_step(FarController& controller, const OrderSource& source, bool may_repeat,
                   PlanOf&& plan_of, RunFar&& run_far, RunDense&& run_dense) {
  const LossPlan& audited = plan_of(FarStep{.far = true, .audit = true});
  if (source.sharding.words == nullptr) {  // else ranks have looked at it together
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

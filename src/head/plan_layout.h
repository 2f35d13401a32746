// The layout of a plan's workspace: the planner computes it once, and runs only read it.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "core/check.h"
#include "logitless/plan.h"

namespace logitless {

// Base of cpu::Layout and cuda::Layout.
struct PlanLayout {};

// Access to private members of LossPlan.
struct LossPlanAccess {
  // The workspace of a plan's audit follows the layout.
  template <typename Layout>
  static void set_layout(LossPlan& plan, Layout layout) {
    plan.workspace_bytes_ =
        layout.total + (plan.audit == nullptr ? 0 : plan.audit->workspace_bytes());
    plan.layout_ = std::make_shared<const Layout>(std::move(layout));
  }
  // Returns the layout of a plan, which is of the type's device.
  template <typename Layout>
  static const Layout& layout(const LossPlan& plan) {
    require(plan.layout_ != nullptr,
            "plan: expected one made by plan_head or the like, got an empty one");
    return static_cast<const Layout&>(*plan.layout_);
  }
  static void set_workspace_bytes(LossPlan& plan, std::size_t bytes) {
    plan.workspace_bytes_ = bytes;
  }
};

}  // namespace logitless

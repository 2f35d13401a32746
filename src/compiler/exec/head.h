// The head operation of programs, on every device.
#pragma once

#include "compiler/exec/backend.h"
#include "compiler/exec/frame.h"

namespace logitless::ir {

// Runs a head in a context of the program's device, on a GPU by enqueuing it.
void run_head(const HeadRun& head, const Frame& frame, const Context& context,
              const HeadUnder& under);

// Returns the context of far's controller. Throws InvalidArgument if it is not of the device that
// the program was compiled for.
const Context& context_of(const FarFieldHead& far, DeviceKind device);

// Returns the plan of the program's audited steps under `far`. Throws Unsupported if there is no
// head that can use the far field, and InvalidArgument as context_of() does.
LossPlan far_plan(const Program& program, const FarFieldHead& far, DeviceKind device);

// Completes `ranks` by its plan and the workspace that it needs. Collective.
void plan_over_ranks(HeadOverRanks::State& ranks, std::size_t memory_budget);

}  // namespace logitless::ir

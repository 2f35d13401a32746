// Orders instructions for a lower peak of memory.
#pragma once

#include <vector>

#include "compiler/plan/program.h"
#include "compiler/plan/schedule.h"

namespace logitless::ir {

// Returns the instructions as steps and the arena's buffers as values. An instruction that writes
// memory keeps its order relative to all accesses to that memory, the caller's included. So results
// have the same bits in every order. Scratch of kernels does not count, so that the order does not
// depend on threads.
Schedule schedule_of(const Program& program);

// Reorders the instructions if the arena's values then take less memory, and plans memory
// (plan_memory). Instructions are moved, not changed: fusions, accumulations and writes in place
// stay. Call it after the last instruction, before memory is planned.
void order_for_memory(Program& program);

}  // namespace logitless::ir

// Instructions in an order in which less memory is needed at once.
#pragma once

#include <vector>

#include "compiler/plan/program.h"
#include "compiler/plan/schedule.h"

namespace logitless::ir {

// The instructions as steps and the arena's buffers as values. An instruction that writes memory
// keeps its place before and after all that name that memory, the caller's included: results have
// the same bits in every order. Buffers without value bytes, scratch of kernels, do not count, so
// that the order does not depend on threads.
Schedule schedule_of(const Program& program);

// Plans memory (plan_memory) with the instructions in another order where the arena's values then
// take less, else in the given one. Instructions are moved and not changed: what was fused, is
// added to or is written in place stays so. Once they are all there, before memory is planned.
void order_for_memory(Program& program);

}  // namespace logitless::ir

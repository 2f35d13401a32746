// What each instruction of a program takes on a GPU.
#pragma once

#include "compiler/exec/cuda/steps.h"

namespace logitless::ir {

// One run to warm up, one of the captured graph in which an event follows each instruction, and
// `repeat` of that graph which are timed. Waits.
Timed time_steps(const Steps& steps, const Frame& frame, const Context& context, int repeat);

}  // namespace logitless::ir

// Times each instruction of a program on a GPU.
#pragma once

#include "compiler/exec/cuda/steps.h"

namespace logitless::ir {

// Runs once to warm up, then once with a captured graph that records an event after each
// instruction. Then times `repeat` runs of that graph. Waits.
Timed time_steps(const Steps& steps, const Frame& frame, const Context& context, int repeat);

}  // namespace logitless::ir

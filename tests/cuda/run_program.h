// Running compiled programs on a GPU in tests.
#pragma once

#include <logitless/compiler.h>
#include <logitless/context.h>

#include <optional>

#include "compiler/ir/interpreter.h"

namespace logitless::test {

// The current device as compile() takes it, or none without one.
std::optional<DeviceLimits> gpu();

// As execute() of compiler/run.h, on the device: results as doubles; the arena is filled with NaN
// and fenced. `times`: runs one after another into the same memory; the last one's results.
ir::Tensors execute_on_gpu(const CompiledProgram& program, const ir::Tensors& inputs,
                           int times = 1);

}  // namespace logitless::test

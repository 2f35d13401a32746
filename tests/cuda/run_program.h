// Running compiled programs on a GPU in tests.
#pragma once

#include <logitless/compiler.h>
#include <logitless/context.h>
#include <logitless/far_field.h>

#include <optional>

#include "compiler/ir/interpreter.h"

namespace logitless::test {

// The current device as compile() takes it, or none without one.
std::optional<DeviceLimits> gpu();

// As execute() of compiler/run.h, on the device: results as doubles; the arena is filled with NaN
// and fenced. `times`: runs one after another into the same memory; the last one's results. far:
// null, or what its head is under. before: as of execute().
ir::Tensors execute_on_gpu(const CompiledProgram& program, const ir::Tensors& inputs, int times = 1,
                           FarFieldHead* far = nullptr, const ir::Tensors& before = {});

}  // namespace logitless::test

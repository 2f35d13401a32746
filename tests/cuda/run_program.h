// Runs compiled programs on a GPU in tests.
#pragma once

#include <logitless/compiler.h>
#include <logitless/context.h>
#include <logitless/far_field.h>

#include <optional>

#include "compiler/ir/interpreter.h"

namespace logitless::test {

// Limits of the current device for compile(), or none without a device.
std::optional<DeviceLimits> gpu();

// Runs like execute() of compiler/run.h, on the device, and returns results as doubles. The arena
// is filled with NaN and guarded. `times`: consecutive runs in the same memory; the last one's
// results count. From the third on runs of 8 launches and more are one graph
// (exec/cuda/replays.h). far: the FarFieldHead of its head, or null. before: as in execute().
ir::Tensors execute_on_gpu(const CompiledProgram& program, const ir::Tensors& inputs, int times = 1,
                           FarFieldHead* far = nullptr, const ir::Tensors& before = {});
// Captures a run in a graph and launches the graph twice; results are those of the second launch.
ir::Tensors replay_on_gpu(const CompiledProgram& program, const ir::Tensors& inputs);

}  // namespace logitless::test

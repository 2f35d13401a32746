// What reshapes and transposes make of memory, where something on the way has no strides of its
// own.
#pragma once

#include <optional>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

class Lowering;  // plan/lowering.h

// The value as a view of what its reshapes and transposes move about: dimensions that became one
// may be parted again, as [B, H, T] -> [H, B, T] -> [H, B T] -> [H, B, T]. None where strides
// cannot say it of the value itself, or can of all on the way (then it is a view of its operand).
std::optional<View> moved_view(Lowering& lowering, Value v);

}  // namespace logitless::ir

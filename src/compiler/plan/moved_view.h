// Views of memory through reshapes and transposes whose intermediate values have no single strides.
#pragma once

#include <optional>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

class Lowering;  // plan/lowering.h

// Returns the value as a view of the value below its reshapes and transposes. Merged dimensions may
// be split again, as in [B, H, T] -> [H, B, T] -> [H, B T] -> [H, B, T]. Returns nothing if strides
// cannot express the value, or if all intermediate values have strides (a plain view).
std::optional<View> moved_view(Lowering& lowering, Value v);

}  // namespace logitless::ir

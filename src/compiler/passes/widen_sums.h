// cast f32 (dot ... : bf16)  ->  dot ... : f32
//
// A sum that is rounded to 16 bit only to be widened again is kept as it was added up: gradients of
// fp32 weights that are used in bf16. Also through transposes and reshapes in between. Expects
// single use of what is widened; keeps results and their types.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

Graph widen_sums(const Graph& graph);

}  // namespace logitless::ir

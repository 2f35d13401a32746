// widen-sums: cast f32 (dot ... : bf16)  ->  dot ... : f32
//
// Keeps the fp32 sum if the rounded 16-bit result is only widened again, as in gradients of fp32
// weights that are used in bf16. Looks through transposes and reshapes. Expects a single reader of
// the widened value; keeps results and their types.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

Graph widen_sums(const Graph& graph);

}  // namespace logitless::ir

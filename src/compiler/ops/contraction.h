// Common functions of dot and fused_dot.
#pragma once

#include <vector>

#include "compiler/ir/interpreter.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

class Lowering;     // plan/lowering.h
struct Evaluation;  // ir/evaluation.h
struct Typing;      // ir/typing.h

// Type and value from the first two operands and Attributes' batch and contract dimensions.
std::vector<Type> dot_type(const Typing& typing);
std::vector<Tensor> dot_value(const Evaluation& evaluation);
// Returns the product that writes result 0 of the node to its destination, and counts its work.
Gemm dot_gemm(Lowering& lowering, int node);

}  // namespace logitless::ir

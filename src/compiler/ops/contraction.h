// What dot and fused_dot have in common.
#pragma once

#include <vector>

#include "compiler/ir/interpreter.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

class Lowering;     // plan/lowering.h
struct Evaluation;  // ir/evaluation.h
struct Typing;      // ir/typing.h

// Of the first two operands and Attributes' batch and contract dimensions.
std::vector<Type> dot_type(const Typing& typing);
std::vector<Tensor> dot_value(const Evaluation& evaluation);
// The product that makes result 0 of the node where it must go, its work counted.
Gemm dot_gemm(Lowering& lowering, int node);

}  // namespace logitless::ir

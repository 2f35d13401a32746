// Describes instructions in text and in numbers, for reports and timings.
#pragma once

#include <string>

#include "compiler/plan/program.h"

namespace logitless::ir {

// Returns kind, sizes and dtypes: equal for equal instructions, whatever their memory.
std::string describe(const Instruction& instruction);

// Returns what a group with a product computes in its epilogue: "7 generated steps, 1 stored".
std::string stages_text(const RowGroup& group);

// Returns the floating-point operations of matrix products, of attention (half if causal) and of
// heads by the GEMMs of their plan. Returns 0 for other instructions and for loops.
double flops_of(const Instruction& instruction);

}  // namespace logitless::ir

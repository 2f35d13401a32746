// What instructions do, in words and in numbers: for reports and for what times them.
#pragma once

#include <string>

#include "compiler/plan/program.h"

namespace logitless::ir {

// Kind, sizes and dtypes: equal for instructions that are alike, whatever their memory is.
std::string describe(const Instruction& instruction);

// Floating-point operations of products, of attention (half of them where it is causal) and of
// heads by the passes of their plan; 0 of all others, and of a loop.
double flops_of(const Instruction& instruction);

}  // namespace logitless::ir

// Formats one step of a loop as an expression of CUDA C++.
#pragma once

#include <string>

#include "compiler/plan/program.h"

namespace logitless::ir {

// `wide`: registers are double, else float. Operands are names or literals.
std::string step_text(const Pointwise::Step& step, bool wide, const std::string& a,
                      const std::string& b, const std::string& c);
// Returns a literal of the register's type.
std::string literal(double number, bool wide);

}  // namespace logitless::ir

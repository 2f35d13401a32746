// Describes instructions in text and in numbers, and predicts the time of a program.
#pragma once

#include <string>

#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// --- describe.cpp

// Returns kind, sizes and dtypes: equal for equal instructions, whatever their memory.
std::string describe(const Instruction& instruction);

// Returns the floating-point operations of matrix products, of attention (half if causal) and of
// heads by the GEMMs of their plan. Returns 0 for other instructions and for loops.
double flops_of(const Instruction& instruction);

// --- cost.cpp

// Returns whether a function takes about as long as exp; others take a fraction of that.
bool is_slow(Function function);

// Returns the seconds of one run, by a roofline model. An instruction takes the longer of its
// arithmetic and its memory traffic, and a launch. A loop takes its body once for each round.
//
// Matrix products run at their full rate if tiles of their result fill the machine. Thin ones
// compute rows that do not exist, and small ones leave units idle. Sums over chunks also pay for
// the bytes that each round reads and writes. Pure, and the same for any number of threads.
double predicted_seconds(const Program& program, const Rates& rates);
double predicted_seconds(const Instruction& instruction, const Rates& rates);

}  // namespace logitless::ir

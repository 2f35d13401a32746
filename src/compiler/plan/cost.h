// Predicts the time of a program from the rates of its target.
#pragma once

#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// Returns the seconds of one run, by a roofline model. An instruction takes the longer of its
// arithmetic and its memory traffic, and a launch. A loop takes its body once for each round.
//
// Matrix products run at their full rate if tiles of their result fill the machine. Thin ones
// compute rows that do not exist, and small ones leave units idle. Sums over chunks also pay for
// the bytes that each round reads and writes. Pure, and the same for any number of threads.
double predicted_seconds(const Program& program, const Rates& rates);
double predicted_seconds(const Instruction& instruction, const Rates& rates);

}  // namespace logitless::ir

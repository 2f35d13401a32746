// What a program is predicted to take, from the rates of the machine that it is for.
#pragma once

#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// Seconds of one run. An instruction takes what is longer, its products and functions or its bytes,
// and a launch beside it; a loop its body once for each round. Products run at their rate where
// tiles of their result fill the machine: thin ones compute rows that are not there, small ones
// leave units idle. Sums over chunks pay for the bytes that they read and write in each round
// beside all that. Pure, and the same for any number of threads.
double predicted_seconds(const Program& program, const Rates& rates);
double predicted_seconds(const Instruction& instruction, const Rates& rates);

}  // namespace logitless::ir

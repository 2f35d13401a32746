#pragma once

#include <string>
#include <vector>

#include "logitless/compiler.h"

namespace logitless::cli {

struct ProgramTimes {
  std::string text;                           // a line
  std::vector<InstructionTime> profile = {};  // where it was asked for
};

// Runs a program `repeat` times by turns as compiled and without loops, on random numbers (indices
// from 0 to 99), and says the median seconds of each and their ratio. With `profile` it is then run
// as often for the times of its instructions.
ProgramTimes time_program(const Graph& graph, const CompileOptions& options, int repeat,
                          bool profile);

// The same on the GPU, of a program compiled for its compute capability; prepared first, which is
// not timed.
ProgramTimes time_program_on_gpu(const Graph& graph, const CompileOptions& options, int repeat,
                                 bool profile);

}  // namespace logitless::cli

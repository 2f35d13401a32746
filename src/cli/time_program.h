#pragma once

#include <string>
#include <vector>

#include "logitless/compiler.h"

namespace logitless::cli {

struct ProgramTimes {
  std::string text;                           // one line
  std::vector<InstructionTime> profile = {};  // only if requested
};

// Runs a program as compiled and without loops, `repeat` times each, interleaved. Inputs are random
// numbers, and indices from 0 to 99. Reports the median seconds of each and their ratio. With
// `profile` it is run as often again for the times of its instructions.
ProgramTimes time_program(const Graph& graph, const CompileOptions& options, int repeat,
                          bool profile);

// Does the same on the GPU, for a program compiled for its compute capability. Preparing it is not
// timed.
ProgramTimes time_program_on_gpu(const Graph& graph, const CompileOptions& options, int repeat,
                                 bool profile);

}  // namespace logitless::cli

#pragma once

#include <string>

#include "logitless/compiler.h"

namespace logitless::cli {

// Runs a program `repeat` times by turns as compiled and without loops, on random numbers (indices
// from 0 to 99), and says the median seconds of each and their ratio. A line of text.
std::string time_program(const Graph& graph, const CompileOptions& options, int repeat);

// The same on the GPU, of a program compiled for its compute capability; prepared first, which is
// not timed.
std::string time_program_on_gpu(const Graph& graph, const CompileOptions& options, int repeat);

}  // namespace logitless::cli

// Loops for tests of the code generator: all functions, dtypes, layouts, reductions and sizes.
#pragma once

#include <span>
#include <vector>

#include "compiler/loops.h"

namespace logitless::test {

// Returns loops with each function of each dtype, including special values, and all conversions.
std::vector<LoopCase> function_cases();
// Returns loops with operands and results that are contiguous, strided, transposed, repeated or
// unaligned, with 0 and 1 elements. Also constants, arguments of loops, and sums in place.
std::vector<LoopCase> layout_cases();
// Returns sums, maxima and log-sum-exps along rows and columns. `large`: up to 65536 rows and 50257
// columns, which a GPU computes at once.
std::vector<LoopCase> reduction_cases(bool large);
// Returns the loops of all programs of programs.h, chunked and not, without loops of equal kernels.
std::vector<LoopCase> program_cases(std::span<const DType> dtypes);

}  // namespace logitless::test

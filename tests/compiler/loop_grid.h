// Loops for the code generator's tests: every function, dtype, layout, reduction and kind of size.
#pragma once

#include <span>
#include <vector>

#include "compiler/loops.h"

namespace logitless::test {

// Each function of each dtype that it takes, special values included; conversions of each dtype to
// each.
std::vector<LoopCase> function_cases();
// Operands and results contiguous, strided, transposed, repeated, beside an even address, of 0 and
// 1 elements; numbers of elements, arguments of loops, sums in place.
std::vector<LoopCase> layout_cases();
// Sums, maxima and log-sum-exps along rows and columns. `large`: up to 65536 rows and 50257
// columns, which a GPU takes at once.
std::vector<LoopCase> reduction_cases(bool large);
// The loops of all programs of programs.h, chunked and not; once each that has kernels of its own.
std::vector<LoopCase> program_cases(std::span<const DType> dtypes);

}  // namespace logitless::test

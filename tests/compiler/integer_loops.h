// Loops of integers for tests of the code generator: every bit is that of the CPU's executor.
#pragma once

#include <vector>

#include "compiler/loops.h"
#include "compiler/row_groups.h"

namespace logitless::test {

// Returns loops of i32 and i64 that wrap, compare, choose, convert, and reduce rows and columns,
// alone and beside floats.
std::vector<LoopCase> integer_cases();

// Runs the case on integers from all over their range. Memory must be as run_pointwise() leaves it.
void check_integer_case(const LoopCase& c, std::uint64_t seed, const KernelRunner& run);

// Returns a row group for a GPU that compares labels and positions beside floats.
GroupCase integer_group();
// Runs the group. What it stores must be as its loops leave it one by one on a CPU.
void check_integer_group(const GroupCase& c, std::uint64_t seed, const KernelRunner& run);

}  // namespace logitless::test

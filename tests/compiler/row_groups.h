// Row groups of a GPU for tests of the code generator.
#pragma once

#include <string>
#include <vector>

#include "compiler/loops.h"
#include "compiler/product_programs.h"

namespace logitless::test {

// A row group and the buffers of its program.
struct GroupCase {
  LoopCase memory;  // its loop is unused
  ir::RowGroup group;
};
// Returns the row group of a program for compute capability 9.0.
GroupCase group_case(const std::string& text);

// Returns the product with an epilogue of a program for compute capability 8.0.
GroupCase product_group(const ProductProgram& program, const ProductSizes& sizes);

// Returns groups whose rows take several blocks of a cluster: losses with log-sum-exps, sums,
// maxima, divisions and roots; rows that fill the blocks and that do not.
std::vector<GroupCase> long_row_groups();
// Returns a group whose stages compute one value several times, before a sum of rows and behind it.
GroupCase repeated_group(const std::string& dtype);
// Runs the group on random numbers. What it stores must be near what its loops leave one by one on
// a CPU.
void check_group(const GroupCase& c, std::uint64_t seed, const KernelRunner& run);

}  // namespace logitless::test

// Makes elementwise loops and sums of rows the epilogues of the matrix products that they read, so
// that the product is never stored.
#pragma once

#include "compiler/plan/program.h"

namespace logitless::ir {

class Target;

// Fuses products with all that reads their results, after group_rows() and before memory is
// planned: row groups, loops over their elements, and picks of one element of each row, which
// become sums. What needs those sums stays behind in loops of its own. Not fused: products that
// are added to memory, in batches, or with an epilogue of the library; readers that use a sum of
// rows for each element, or sum columns; rows that are not aligned to 16 bytes; and where the
// predicted time is longer.
void fuse_products(Program& program, const Target& target);

// Returns whether a leaf reads the result of the group's product.
bool reads_product(const RowGroup& group, const Pointwise::Leaf& leaf);

}  // namespace logitless::ir

// Chooses the order of a loop's dimensions by the memory of its operands and results.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/plan/program.h"

namespace logitless::ir {

// Returns the loop with its dimensions in `order`; kinds of reductions stay.
Pointwise permuted(const Pointwise& loop, const std::vector<std::size_t>& order);

// Returns a reduction whose innermost dimension is the one along which most bytes are contiguous:
// of rows if that is a reduced dimension, else of columns. Depends on the loop alone. A reduced
// dimension that becomes the innermost changes the order of additions.
Pointwise reduction_in_memory_order(const Pointwise& loop);

// How a map accesses memory: the dimension along which its result is contiguous, and if operands
// are contiguous along another one, this dimension and their leaves.
struct MapOrder {
  std::size_t inner = 0;
  std::size_t turned = 0;           // the other dimension
  std::vector<std::size_t> leaves;  // empty: none
};
MapOrder memory_order_of(const Pointwise& map);

}  // namespace logitless::ir

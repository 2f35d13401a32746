// Sorting whole rows by the digits of their keys, for sort.cu.
#pragma once

#include <cstdint>

#include "kernels/device/sort.h"

namespace logitless::cuda {

// Returns whether sort_rows_by_digits() takes the call: many elements of each row are kept, and
// lists of indices fit into shared memory or into the result.
bool sorts_by_digits(const SortRowsCall& call);
// Sorts like sort_rows(), with the same results.
void sort_rows_by_digits(const SortRowsCall& call, std::int64_t rows);

}  // namespace logitless::cuda

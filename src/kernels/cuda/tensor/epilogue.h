// Separate epilogue kernels, for epilogues that the library's GEMMs cannot fuse.
#pragma once

#include <cstdint>

#include "kernels/device/gemm.h"

namespace logitless::cuda {

// c += bias + residual in place, where c holds the GEMM's result rounded to its dtype.
void apply_epilogue(const GemmShape& shape, const GemmCall& call);

// fp32 sums [parts, rows, columns] of a block of c. All parts together are over the contracted
// elements before first_k.
struct BlockSums {
  const float* sums = nullptr;
  std::int64_t stride = 0;  // of rows
  std::int64_t parts = 1;
  std::int64_t first_row = 0, rows = 0, first_column = 0, columns = 0;
  std::int64_t first_k = 0;
};
// Makes the block of c: adds up the parts in order, adds the terms from first_k on, the old c where
// the shape accumulates, and the epilogue, and rounds once. Of a batch, the call has the addresses
// of one GEMM.
void finish_block(const GemmShape& shape, const GemmCall& call, const BlockSums& block);

}  // namespace logitless::cuda

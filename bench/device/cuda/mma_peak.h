// The rate of mma.sync from registers alone: the ceiling of kernels made of it.
#pragma once

namespace logitless::bench {

// Returns operations a second of bf16 products with fp32 sums, 8 warps of 64 x 64 results on each
// SM.
double mma_peak();

}  // namespace logitless::bench

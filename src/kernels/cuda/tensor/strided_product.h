// GEMM of any strides and dtypes.
#pragma once

#include "kernels/device/gemm.h"

namespace logitless::cuda {

// Tiles of 64 x 64 with plain fused multiply-adds: supports every GemmShape, at a tenth of the
// tensor cores' throughput.
void multiply_strided(const GemmShape& shape, const void* a, const void* b, void* c, Stream stream);

}  // namespace logitless::cuda

// Products of any strides and dtypes.
#pragma once

#include "kernels/device_gemm.h"

namespace logitless::cuda {

// Tiles of 64 x 64 by plain multiply-adds: right for every ProductShape, at a tenth of the rate of
// matrix units.
void multiply_strided(const ProductShape& shape, const void* a, const void* b, void* c,
                      Stream stream);

}  // namespace logitless::cuda

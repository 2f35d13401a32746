// Epilogues apart from their products: what a library's kernels do not take.
#pragma once

#include "kernels/device_gemm.h"

namespace logitless::cuda {

// c += bias + residual in place, where c holds the product rounded to its dtype.
void apply_epilogue(const ProductShape& shape, const ProductCall& call);

}  // namespace logitless::cuda

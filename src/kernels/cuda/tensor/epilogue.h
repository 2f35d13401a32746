// Separate epilogue kernels, for epilogues that the library's GEMMs cannot fuse.
#pragma once

#include "kernels/device/gemm.h"

namespace logitless::cuda {

// c += bias + residual in place, where c holds the GEMM's result rounded to its dtype.
void apply_epilogue(const GemmShape& shape, const GemmCall& call);

}  // namespace logitless::cuda

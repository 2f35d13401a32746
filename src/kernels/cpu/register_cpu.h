// The CPU's rows of the kernel registry, best first.
#pragma once

#include <vector>

#include "kernels/cpu_head.h"

namespace logitless::cpu {

std::vector<HeadKernel> simd_kernels(bool dot_product_is_fast);
// The code of amx_bf16 with the tile unit in plain C++: slow, runs anywhere, for tests.
HeadKernel emulated_amx_kernel();

}  // namespace logitless::cpu

// Registry entries of the CPU kernels, best first.
#pragma once

#include <vector>

#include "kernels/cpu_head.h"

namespace logitless::cpu {

std::vector<HeadKernel> simd_kernels(bool dot_product_is_fast);
// The code of amx_bf16 with emulated tiles in plain C++: slow, runs anywhere, for tests.
HeadKernel emulated_amx_kernel();

}  // namespace logitless::cpu

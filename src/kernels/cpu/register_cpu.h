// The CPU's rows of the kernel registry, best first.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace logitless::cpu {

std::vector<HeadKernel> simd_kernels();

}  // namespace logitless::cpu

// The float64 oracle's row of the kernel registry.
#pragma once

#include "kernels/cpu_head.h"

namespace logitless::reference {

HeadKernel reference_kernel();

}  // namespace logitless::reference

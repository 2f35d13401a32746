// Registry entry of the float64 reference kernel.
#pragma once

#include "kernels/cpu_head.h"

namespace logitless::reference {

HeadKernel reference_kernel();

}  // namespace logitless::reference

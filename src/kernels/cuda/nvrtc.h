// Compilation by NVRTC that takes little time, for tests of whether a text compiles.
#pragma once

#include <string>
#include <string_view>

namespace logitless::cuda {

// Compiles like compile_cuda() (kernels/device/module.h) with little optimisation, in about a fifth
// of the time. NVRTC before 13.0 does not know how, and takes as long. The code is slow.
std::string compile_cuda_fast(std::string_view source, int compute_capability);

}  // namespace logitless::cuda

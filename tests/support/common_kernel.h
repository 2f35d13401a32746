// A kernel for tests of how many tiles the far field selects, which depends on a kernel's blocks of
// tokens.
#pragma once

#include <algorithm>
#include <string>

#include "logitless/context.h"

namespace logitless::test {

// The same on all machines that can run it.
inline std::string common_kernel() {
  const auto kernels = kernel_names();
  return std::find(kernels.begin(), kernels.end(), "avx2") != kernels.end() ? "avx2" : "scalar";
}

}  // namespace logitless::test

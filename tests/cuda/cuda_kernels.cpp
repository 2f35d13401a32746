// Linked into the binaries that run the head's tests on a GPU: selects the GPU kernels as the
// tested ones. Without a GPU there are none, and this file's test reports the reason.
#include <gtest/gtest.h>

#include "kernels/device/gpu_kernels.h"
#include "kernels/device/kernel.h"
#include "support/mirror.h"

namespace logitless::test {

// Returns the kernels of LOGITLESS_GPU_KERNELS that run on the GPU. precision_test.cpp tests those
// of another precision than ieee.
std::vector<std::string> tested_kernels() {
  std::vector<std::string> names;
  if (!cuda::device_missing(0).empty()) return names;
  const int capability = cuda::compute_capability(0);
  for (const cuda::DeviceKernel* kernel : cuda::gpu_kernels()) {
    if (!cuda::capability_refusal(*kernel, capability).empty()) continue;
    if (!tested_dtypes(kernel->name).empty()) names.emplace_back(kernel->name);
  }
  return names;
}

TEST(CudaHead, HasAGpu) {
  const std::string reason = cuda::device_missing(0);
  if (!reason.empty()) GTEST_SKIP() << reason;
  EXPECT_FALSE(tested_kernels().empty());
}

}  // namespace logitless::test

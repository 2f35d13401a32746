// Linked into the binaries that run the head's tests on a GPU: selects the GPU kernels as the
// tested ones. Without a GPU there are none, and this file's test reports the reason.
#include <gtest/gtest.h>

#include "kernels/device/kernel.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {

std::vector<std::string> kernels_of_any_dtype() {
  std::vector<std::string> names;
  if (!cuda::device_missing(0).empty()) return names;
  for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) names.emplace_back(kernel.name);
  // precision_test.cpp tests those of another precision.
  std::erase_if(names, [](const std::string& name) {
    HeadSpec spec;
    const auto takes = [&](DType dtype) {
      spec.dtype = dtype;
      return accepts(name, spec);
    };
    return !takes(DType::bf16) && !takes(DType::f16) && !takes(DType::f32);
  });
  return names;
}

std::vector<std::string> tested_kernels() {
  std::vector<std::string> names = kernels_of_any_dtype();
  HeadSpec bf16;
  bf16.dtype = DType::bf16;
  std::erase_if(names, [&](const std::string& name) { return !accepts(name, bf16); });
  return names;
}

TEST(CudaHead, HasAGpu) {
  const std::string reason = cuda::device_missing(0);
  if (!reason.empty()) GTEST_SKIP() << reason;
  EXPECT_FALSE(tested_kernels().empty());
}

}  // namespace logitless::test

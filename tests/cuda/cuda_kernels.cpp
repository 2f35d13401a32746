// Linked into the binaries that run the head's tests on a GPU: selects the GPU kernels as the
// tested ones. Without a GPU there are none, and this file's test reports the reason.
#include <gtest/gtest.h>

#include "kernels/device/kernel.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

// A head whose width every kernel takes.
HeadSpec head_of(DType dtype) {
  HeadSpec spec;
  spec.dim = 8;
  spec.dtype = dtype;
  return spec;
}

}  // namespace

std::vector<std::string> kernels_of_any_dtype() {
  std::vector<std::string> names;
  if (!cuda::device_missing(0).empty()) return names;
  for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) names.emplace_back(kernel.name);
  // precision_test.cpp tests those of another precision.
  std::erase_if(names, [](const std::string& name) {
    const auto takes = [&](DType dtype) { return accepts(name, head_of(dtype)); };
    return !takes(DType::bf16) && !takes(DType::f16) && !takes(DType::f32);
  });
  return names;
}

std::vector<std::string> tested_kernels() {
  std::vector<std::string> names = kernels_of_any_dtype();
  std::erase_if(names,
                [](const std::string& name) { return !accepts(name, head_of(DType::bf16)); });
  return names;
}

TEST(CudaHead, HasAGpu) {
  const std::string reason = cuda::device_missing(0);
  if (!reason.empty()) GTEST_SKIP() << reason;
  EXPECT_FALSE(tested_kernels().empty());
}

}  // namespace logitless::test

// Tensors of a test in the memory of the kernel under test: the host's own, or copies on the GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/device/head.h"
#include "logitless/logitless.h"

namespace logitless::test {

// Kernels of a parameterised test: this machine's, or the GPU's in the binaries that link
// cuda_kernels.cpp.
std::vector<std::string> tested_kernels();
// Returns the dtypes of hidden and weight that tests of a kernel take: of f32, bf16 and, on a GPU,
// f16 those that it accepts.
std::vector<DType> tested_dtypes(const std::string& kernel);
// Returns bf16, or f16 where a kernel does not take bf16.
DType narrow_dtype(const std::string& kernel);
bool is_device_kernel(const std::string& kernel);
Context make_context(const std::string& kernel, int threads = 2);

class Mirror {
 public:
  explicit Mirror(const std::string& kernel) : device_(is_device_kernel(kernel)) {}
  // Returns a copy with the same strides, or the view itself on the CPU.
  ConstTensorView in(const ConstTensorView& view);
  // Copies the view's contents to the device and, by finish, back.
  TensorView out(const TensorView& view);
  CrossEntropyInputs in(const CrossEntropyInputs& inputs);
  CrossEntropyOutputs out(const CrossEntropyOutputs& outputs);
  void finish();

 private:
  struct Copy {
    std::unique_ptr<cuda::DeviceMemory> memory;
    void* host;
    std::size_t bytes;
  };
  void* upload(const void* data, std::size_t bytes);

  bool device_;
  std::vector<Copy> copies_;
};

}  // namespace logitless::test

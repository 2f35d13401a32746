// Runs generated kernels on the CPU. The host's C++ compiler compiles their text, and the threads
// of a block take turns between barriers.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "compiler/exec/cuda/codegen.h"

namespace logitless::test {

class HostKernels {
 public:
  // Throws InternalError with the compiler's message. Products are of one engine.
  explicit HostKernels(std::span<const ir::GeneratedKernel> kernels);
  // `arguments`: the address of each, as for cuda::launch(); of a HostMatrix for a matrix.
  void run(const ir::GeneratedKernel& kernel, std::span<void* const> arguments) const;

 private:
  std::shared_ptr<void> library_;
};

// Returns whether this machine has the compiler that built this test.
bool has_host_compiler();

}  // namespace logitless::test

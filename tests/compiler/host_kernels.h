// Generated kernels on this machine: their text compiled by the host's C++ compiler, the threads of
// a block run by turns up to where they wait for each other.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "compiler/exec/cuda/codegen.h"

namespace logitless::test {

class HostKernels {
 public:
  // Throws InternalError with the compiler's complaint.
  explicit HostKernels(std::span<const ir::GeneratedKernel> kernels);
  // `arguments`: the address of each, as cuda::launch() takes them.
  void run(const ir::GeneratedKernel& kernel, std::span<void* const> arguments) const;

 private:
  std::shared_ptr<void> library_;
};

// Whether this machine has the compiler that built this test.
bool has_host_compiler();

}  // namespace logitless::test

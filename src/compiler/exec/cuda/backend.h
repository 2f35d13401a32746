// Runs programs on a GPU: prepare() generates and loads the kernels once, a run enqueues them.
#pragma once

#include "compiler/exec/backend.h"

namespace logitless::ir {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int compute_capability) : compute_capability_(compute_capability) {}

  // Throws InvalidArgument: programs on a GPU need prepare().
  void run(const Program& program, std::span<const void* const> parameters,
           std::span<void* const> results, std::byte* arena, const HeadUnder& under,
           Observer* observer) const final;
  std::unique_ptr<const Prepared> prepare(const Program& program,
                                          const Context& context) const final;

 private:
  int compute_capability_;
};

}  // namespace logitless::ir

// Runs programs on the CPU.
#pragma once

#include "compiler/exec/backend.h"

namespace logitless::ir {

// Allocates nothing but plans and orders of the far field, and these only with `far`. The program
// fixes the tasks, so results do not depend on `threads`.
class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) : threads_(threads) {}

  void run(const Program& program, std::span<const void* const> parameters,
           std::span<void* const> results, std::byte* arena, const HeadUnder& under,
           Observer* observer) const final;
  std::unique_ptr<const Prepared> prepare(const Program& program,
                                          const Context& context) const final;

 private:
  int threads_;
};

}  // namespace logitless::ir

// Runs programs on the CPU.
#pragma once

#include "compiler/exec/backend.h"

namespace logitless::ir {

// Allocates nothing but the plan of far_plan() and orders, and these only with `far`. The program
// fixes the tasks, so results do not depend on `threads`.
class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) : threads_(threads) {}

  void run(const Program& program, std::span<const void* const> parameters,
           std::span<void* const> results, std::byte* arena, const HeadUnder& under,
           Observer* observer) const final;
  LossPlan far_plan(const Program& program, const FarFieldHead& far) const final;
  void plan(HeadOverRanks::State& ranks, std::size_t memory_budget) const final;
  std::unique_ptr<const Prepared> prepare(const Program& program,
                                          const Context& context) const final;

 private:
  int threads_;
};

}  // namespace logitless::ir

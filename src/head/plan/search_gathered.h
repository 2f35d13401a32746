// Sizes of plans whose weights move: pieces of rows, chunks of tokens, slabs of a piece's words.
#pragma once

#include "head/plan/search.h"
#include "kernels/cpu_head.h"

namespace logitless {

// What holds on any device.
class GatheredSearch : public PlanSearch {
 public:
  using PlanSearch::PlanSearch;
  std::string refusal(PlanKind kind) const final;
  double passes(PlanKind kind, const PlanSizes& sizes) const final;
};

class GatheredCpuSearch final : public GatheredSearch {
 public:
  GatheredCpuSearch(const PlanProblem& problem, const HeadKernel& kernel, int threads)
      : GatheredSearch(problem), kernel_(kernel), threads_(threads) {}

  SizedPlan best(PlanKind kind, std::size_t budget) const override;
  // At the kernel's nominal rate, without the exchanges.
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  SizedPlan sized(PlanKind kind, const PlanSizes& sizes) const;

  const HeadKernel& kernel_;
  const int threads_;
};

}  // namespace logitless

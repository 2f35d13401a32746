// Sizes of weight-gathered plans: slices of rows, chunks of tokens, and vocabulary blocks of a
// slice.
#pragma once

#include "head/plan/search/search.h"
#include "kernels/cpu_head.h"

namespace logitless {

// The part that is common to all devices.
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
  // Predicts the time at the kernel's nominal rate, without the exchanges.
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  SizedPlan sized(PlanKind kind, const PlanSizes& sizes) const;

  const HeadKernel& kernel_;
  const int threads_;
};

}  // namespace logitless

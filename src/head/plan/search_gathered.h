// Sizes of plans whose weights move: pieces of rows, chunks of tokens, slabs of a piece's words.
#pragma once

#include "head/plan/search.h"
#include "kernels/cpu_head.h"

namespace logitless {

// On any device: why no plan of weights that move has such a kind; and what a plan costs.
std::string refusal_of_gathered(PlanKind kind);
double passes_of_gathered(PlanKind kind, const HeadFeatures& features);

class GatheredCpuSearch final : public PlanSearch {
 public:
  GatheredCpuSearch(const PlanProblem& problem, const HeadKernel& kernel, int threads)
      : PlanSearch(problem), kernel_(kernel), threads_(threads) {}

  std::string refusal(PlanKind kind) const override;
  bool sorts_tokens() const override { return false; }
  std::size_t audit_budget() const override { return 1; }
  SizedPlan best(PlanKind kind, std::size_t budget) const override;
  double passes(PlanKind kind, const PlanSizes& sizes) const override;
  // At the kernel's nominal rate, without the exchanges.
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  SizedPlan sized(PlanKind kind, const PlanSizes& sizes) const;

  const HeadKernel& kernel_;
  const int threads_;
};

}  // namespace logitless

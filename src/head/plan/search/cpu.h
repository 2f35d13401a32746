// Sizes and predicted times of CPU plans.
#pragma once

#include "head/plan/search/search.h"
#include "kernels/cpu_head.h"

namespace logitless {

// Every decision other than fitting uses the sizes for one thread. Chunks, and with them the bits
// of sums, thus do not depend on the number of threads.
class CpuSearch final : public PlanSearch {
 public:
  CpuSearch(const PlanProblem& problem, const HeadKernel& kernel, int threads)
      : PlanSearch(problem), kernel_(kernel), threads_(threads) {}

  std::string refusal(PlanKind kind) const override;
  // Returns the smallest of the fitting sizes that are within 1 % of the fastest. The stored kind
  // and the far field take the fastest.
  SizedPlan best(PlanKind kind, std::size_t budget) const override;
  double passes(PlanKind kind, const PlanSizes& sizes) const override;
  // Predicts the time at the kernel's nominal rate.
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;
  bool stores_all(const PlanSizes& sizes) const override;
  std::string contents(PlanKind kind, const SizedPlan& sized) const override;
  std::size_t weight_sums(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  SizedPlan sized(PlanKind kind, const PlanSizes& sizes) const;
  SizedPlan sized(PlanKind kind, std::int64_t tokens, std::int64_t vocab_block) const;
  SizedPlan largest(PlanKind kind, std::int64_t vocab_block, std::size_t budget,
                    std::int64_t weight_vocab = 0) const;
  bool weight_may_be_apart(PlanKind kind) const;
  SizedPlan with_weight_apart(PlanKind kind, std::size_t budget) const;
  SizedPlan with_stored(std::int64_t tokens, std::int64_t vocab_block, std::size_t budget) const;
  SizedPlan fastest(PlanKind kind, std::size_t budget) const;
  SizedPlan leanest(PlanKind kind, const SizedPlan& fastest, std::size_t budget) const;

  const HeadKernel& kernel_;
  const int threads_;
};

}  // namespace logitless

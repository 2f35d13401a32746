// Sizes of a GPU's plans whose weights move: pieces of rows, slabs of a piece's words. All tokens
// of a rank are one chunk.
#pragma once

#include "head/cuda/layout.h"
#include "head/plan/search.h"

namespace logitless {

class GatheredCudaSearch final : public PlanSearch {
 public:
  GatheredCudaSearch(const PlanProblem& problem, const cuda::DeviceKernel& kernel)
      : PlanSearch(problem),
        kernel_(kernel),
        tokens_(std::max<std::int64_t>(problem.shape.tokens, 1)) {}

  std::string refusal(PlanKind kind) const override;
  bool sorts_tokens() const override { return false; }
  std::size_t audit_budget() const override { return 1; }
  SizedPlan best(PlanKind kind, std::size_t budget) const override;
  double passes(PlanKind kind, const PlanSizes& sizes) const override;
  // Without the exchanges.
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  const cuda::DeviceKernel& kernel_;
  const std::int64_t tokens_;
};

}  // namespace logitless

// Sizes of a GPU's plans whose weights move: pieces of rows, slabs of a piece's words. All tokens
// of a rank are one chunk.
#pragma once

#include "head/cuda/layout.h"
#include "head/plan/search_gathered.h"

namespace logitless {

class GatheredCudaSearch final : public GatheredSearch {
 public:
  GatheredCudaSearch(const PlanProblem& problem, const cuda::DeviceKernel& kernel)
      : GatheredSearch(problem),
        kernel_(kernel),
        tokens_(std::max<std::int64_t>(problem.shape.tokens, 1)) {}

  SizedPlan best(PlanKind kind, std::size_t budget) const override;
  // Without the exchanges.
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  const cuda::DeviceKernel& kernel_;
  const std::int64_t tokens_;
};

}  // namespace logitless

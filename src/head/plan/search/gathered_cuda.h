// Sizes of weight-gathered GPU plans: slices of rows, and vocabulary blocks of a slice. All tokens
// of a rank are one chunk.
#pragma once

#include "head/cuda/layout.h"
#include "head/plan/search/gathered.h"
#include "kernels/device/cards.h"

namespace logitless {

class GatheredCudaSearch final : public GatheredSearch {
 public:
  GatheredCudaSearch(const PlanProblem& problem, const cuda::DeviceKernel& kernel,
                     const DeviceLimits& device)
      : GatheredSearch(problem),
        kernel_(kernel),
        rates_(cuda::rates_on(kernel, cuda::card_or_usual(device.card, device.compute_capability),
                              problem.shape.dtype)),
        tokens_(std::max<std::int64_t>(problem.shape.tokens, 1)) {}

  SizedPlan best(PlanKind kind, std::size_t budget) const override;
  // Predicts the time without the exchanges.
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  const cuda::DeviceKernel& kernel_;
  const cuda::DeviceRates rates_;
  const std::int64_t tokens_;
};

}  // namespace logitless

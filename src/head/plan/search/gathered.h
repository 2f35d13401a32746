// Sizes of weight-gathered plans: slices of rows, chunks of tokens, and vocabulary blocks of a
// slice.
#pragma once

#include "head/cuda/layout.h"
#include "head/plan/search/search.h"
#include "kernels/cpu_head.h"
#include "kernels/device/cards.h"

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

// All tokens of a rank are one chunk.
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

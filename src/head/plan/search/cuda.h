// Sizes and predicted times of GPU plans.
#pragma once

#include "head/cuda/layout.h"
#include "head/plan/search/search.h"
#include "kernels/device/cards.h"

namespace logitless {

// Returns the kernel that the limits name, or the first that takes the head on such a GPU. For the
// far field it is the first that has it, and only if none has it the first that takes the head.
// `reasons` gets a line for each kernel that declined. Throws Unsupported if none takes it.
const cuda::DeviceKernel& choose_device_kernel(const PlanProblem& problem,
                                               const DeviceLimits& device, std::string* reasons);

class CudaSearch final : public PlanSearch {
 public:
  CudaSearch(const PlanProblem& problem, const cuda::DeviceKernel& kernel,
             const DeviceLimits& device)
      : PlanSearch(problem),
        kernel_(kernel),
        card_(cuda::card_or_usual(device.card, device.compute_capability)),
        rates_(cuda::rates_on(kernel, card_, problem.shape.dtype, problem.features.precision)),
        tokens_(std::max<std::int64_t>(problem.shape.tokens, 1)) {}

  std::string refusal(PlanKind kind) const override;
  // Small vocabulary blocks would take longer than the rest of the call.
  std::size_t audit_budget() const override { return 64_MiB; }
  SizedPlan best(PlanKind kind, std::size_t budget) const override;
  double passes(PlanKind kind, const PlanSizes& sizes) const override;
  double far_seconds(PlanKind kind, const PlanSizes& sizes) const;
  double seconds(PlanKind kind, const PlanSizes& sizes) const override;

 private:
  class Offers;
  void each_size(PlanKind kind, Offers& offers) const;
  // offer(number of chunks, tokens of each)
  template <typename Offer>
  void each_chunk(const Offer& offer) const;
  // offer(entries of a vocabulary block)
  template <typename Offer>
  void each_block(const Offer& offer) const;
  bool weight_may_be_apart(PlanKind kind) const;
  void offer_forward(Offers& offers) const;
  void offer_stored(std::int64_t chunk, Offers& offers) const;
  void offer_ranges(std::int64_t chunks, Offers& offers) const;
  void offer_saved(std::int64_t vocab_block, Offers& offers) const;
  // Returns whether d_weight's memory may hold exponentials before it holds d_weight.
  bool weight_is_free() const;
  bool aliases_weight() const;
  std::int64_t least_chunk() const;
  std::size_t bytes(PlanKind kind, const PlanSizes& sizes) const;
  double kept(PlanKind kind) const;
  double sampled(PlanKind kind) const;
  double again(PlanKind kind, const PlanSizes& sizes) const;
  double apart(const PlanSizes& sizes) const;
  double computed_tokens(const cuda::Sizes& sizes) const;
  double weight_bytes() const;

  const cuda::DeviceKernel& kernel_;
  const GpuCard card_;
  const cuda::DeviceRates rates_;
  const std::int64_t tokens_;
};

}  // namespace logitless

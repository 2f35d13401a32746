// The choice of a plan, independent of the device: which kinds exist, why one cannot serve, the
// default, and which of the fitting plans is chosen.
#pragma once

#include "logitless/plan.h"

namespace logitless {

// Plans on this rank alone, for the device and threads of a context or else for request.device.
class LocalPlanner {
 public:
  LocalPlanner() = default;
  LocalPlanner(const Context& context) : context_(&context) {}

  const DeviceLimits& device(const PlanRequest& request) const {
    return context_ != nullptr ? context_->device() : request.device;
  }
  // Does plan_head: features may be sharded, and request.sharding is ignored.
  LossPlan plan(const HeadShape& shape, const HeadFeatures& features,
                const PlanRequest& request) const;
  // Makes a dense plan with all tokens in one chunk on a GPU, for saved_head.h.
  LossPlan plan_in_one_chunk(const HeadShape& shape, const HeadFeatures& features,
                             const PlanRequest& request) const;

 private:
  const Context* context_ = nullptr;
  PlanRequest for_device(const PlanRequest& request) const;
};

// Returns a CPU plan with scratch for `threads`, including that of its audit. Chunks keep their
// sizes, so that results do not depend on the number of threads.
LossPlan with_threads(LossPlan plan, int threads);
// Returns an exact GPU plan with chunks of `tokens`, and its workspace.
LossPlan with_chunk(LossPlan plan, std::int64_t tokens, DeviceKind device);
// Returns a weight-gathered plan with slices of `rows` of each rank, and its workspace.
LossPlan with_slice(LossPlan plan, std::int64_t rows, DeviceKind device);

// --- check.cpp

// Throws InvalidArgument naming the impossible part of the request.
void check_request(const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request);

// Returns whether the request allows a far-field kind.
bool allows(const PlanRequest& request, PlanKind kind);
bool allows_far(const PlanRequest& request);

}  // namespace logitless

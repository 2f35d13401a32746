// The plans of one head under a FarController, and the workspace that they share.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "logitless/cross_entropy.h"

namespace logitless {

class FarPlans {
 public:
  // Returns a plan for at least this shape, these features and exactly this request: the present
  // one, or one that `make` makes. It stays valid until the next of its kind (exact, far, far with
  // an audit).
  const LossPlan& get(const Context& context, const HeadShape& shape, const HeadFeatures& features,
                      const PlanRequest& request,
                      const std::function<LossPlan(const PlanRequest&)>& make);
  // Returns the kinds of plans that this rank must make for these requests of sharded calls, one
  // bit each. Planning is collective, so all ranks make a plan that one of them needs.
  unsigned missing(const HeadShape& shape, const HeadFeatures& features,
                   std::span<const PlanRequest> requests, const Sharding& sharding) const;
  void drop(unsigned kinds);
  // Returns the number of plans made so far.
  std::int64_t made() const { return made_; }
  // Returns whether the current workspace is large enough for all current plans.
  bool has_capacity() const;
  // Returns a workspace of at least the plan's size, replaced if it must grow.
  const Workspace& workspace_for(const Context& context, const LossPlan& plan);
  // Drops the workspace. Later ones are in the memory that `allocate(bytes)` returns, of the
  // largest current plan; with a null function it is their own.
  void borrow(std::function<Workspace(std::size_t bytes)> allocate);
  bool borrows() const { return allocate_ != nullptr; }

 private:
  struct Slot {
    LossPlan plan;
    // The request that the plan was made for, which an exact plan does not record.
    float tau = 0.0f;
    Accuracy accuracy = Accuracy::exact;
    bool serves(const HeadShape& shape, const HeadFeatures& features,
                const PlanRequest& request) const;
  };
  static std::size_t slot_of(const PlanRequest& request);
  std::array<Slot, 3> slots_;
  std::int64_t made_ = 0;
  std::unique_ptr<Workspace> workspace_;
  std::function<Workspace(std::size_t bytes)> allocate_;
};

}  // namespace logitless

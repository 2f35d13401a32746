// The search for the sizes of a plan, with one implementation for each kind of device. The policy
// common to all devices is in choose.cpp; costs and sizes are in cpu.cpp and cuda.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "head/plan_sizes.h"
#include "logitless/plan.h"

namespace logitless {

struct SizedPlan {
  PlanSizes sizes;
  std::size_t bytes = 0;  // 0: none
  std::size_t alone = 0;  // for one thread, of a CPU plan
};

// Inputs of a search. tau, sample_every and audited (tokens) concern the far field.
struct PlanProblem {
  HeadShape shape;
  HeadFeatures features;
  double stored_fraction = 0.0;  // for the stored kind; 0: as much as fits
  float tau = 0.0f;
  std::int64_t sample_every = 0;
  std::int64_t audited = 0;
  float expected_ignored = 0.0f;  // share of the tokens
  bool interleaved = false;       // a table may interleave the sharded vocabulary
  bool one_chunk = false;         // one chunk of all tokens, for a dense plan
  // d_weight may be computed separately, with one more GEMM.
  bool weight_apart = false;
  bool any_size = false;  // take the fastest sizes, even if smaller ones are about as fast
  bool far = false;       // a GPU kernel with the far field, where one takes the head
};

class PlanSearch {
 public:
  explicit PlanSearch(const PlanProblem& problem) : p_(problem) {}
  virtual ~PlanSearch() = default;
  PlanSearch(const PlanSearch&) = delete;
  PlanSearch& operator=(const PlanSearch&) = delete;

  // Reserves the workspace of the plan that audits the far field, after all other buffers.
  void reserve_audit(std::size_t bytes) { audit_bytes_ = bytes; }

  // Returns why the kernel has no plan of a kind whose mathematics serve the features; empty if it
  // has one.
  virtual std::string refusal(PlanKind kind) const = 0;
  // Returns the budget of an audit's plan; the smallest plan is taken if none fits.
  virtual std::size_t audit_budget() const { return 1; }

  // Returns the fastest sizes within the budget, or nearly the fastest; the smallest if none fit.
  virtual SizedPlan best(PlanKind kind, std::size_t budget) const = 0;
  // Returns the GEMMs of tokens * vocab * dim multiply-adds.
  virtual double passes(PlanKind kind, const PlanSizes& sizes) const = 0;
  virtual double seconds(PlanKind kind, const PlanSizes& sizes) const = 0;
  // Returns whether a stored plan saves exp(z) of the full vocabulary, and so is the dense plan.
  virtual bool stores_all(const PlanSizes&) const { return false; }

  // Describes the large parts of the workspace; empty if the device does not.
  virtual std::string contents(PlanKind, const SizedPlan&) const { return {}; }
  // Returns the bytes of the workspace that hold sums of a 16-bit d_weight over several chunks.
  virtual std::size_t weight_sums(PlanKind, const PlanSizes&) const { return 0; }

 protected:
  PlanProblem p_;
  std::size_t audit_bytes_ = 0;
};

// A search and the kernel that it is for, as in LossPlan.
struct KernelSearch {
  std::unique_ptr<PlanSearch> search;
  std::string kernel;
  std::string kernel_reasons;
  int threads = 0;
};

// Makes the search for the device of the request. Throws Unsupported if no kernel takes the head.
KernelSearch make_search(const PlanProblem& problem, const DeviceLimits& device);

// Keeps the fastest of the sizes that fit into a budget, or the smallest if none fits.
class BestSize {
 public:
  explicit BestSize(std::size_t budget) : budget_(budget) {}
  void offer(const SizedPlan& sized, double seconds) {
    const bool fits = sized.bytes <= budget_;
    const bool best_fits = best_.bytes != 0 && best_.bytes <= budget_;
    if (best_.bytes == 0 || (fits && !best_fits) || (fits && best_fits && seconds < seconds_) ||
        (!fits && !best_fits && sized.bytes < best_.bytes)) {
      best_ = sized;
      seconds_ = seconds;
    }
  }
  const SizedPlan& found() const { return best_; }

 private:
  std::size_t budget_;
  SizedPlan best_;
  double seconds_ = 0.0;
};

// Returns the last number in [low, high) for which a monotone condition holds, by bisection; low if
// there is none.
template <typename Holds>
std::int64_t last_that(std::int64_t low, std::int64_t high, Holds holds) {
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

// Returns the requested fraction of a stored plan in whole tiles.
inline std::int64_t stored_tiles(double fraction, std::int64_t tiles) {
  return std::clamp<std::int64_t>(std::llround(fraction * static_cast<double>(tiles)), 1, tiles);
}

}  // namespace logitless

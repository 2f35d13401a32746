// The search for the sizes of a plan: what choosing one asks of a device. Policy that holds on
// every device is in choose.cpp, costs and sizes in search_cpu.cpp and search_cuda.cpp.
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
  std::size_t alone = 0;  // for one thread, of a CPU's plan
};

// What a search is for. tau, sample_every and audited (tokens) are of the far field.
struct PlanProblem {
  HeadShape shape;
  HeadFeatures features;
  double stored_fraction = 0.0;  // of the stored kind; 0: as much as fits
  float tau = 0.0f;
  std::int64_t sample_every = 0;
  std::int64_t audited = 0;
  bool dealt = false;      // of words spread over ranks: by a table
  bool one_chunk = false;  // of all tokens, of a dense plan
  // d_weight may have a pass of its own.
  bool weight_apart = false;
  bool any_size = false;  // the fastest sizes, whatever others that are about as fast would take
};

class PlanSearch {
 public:
  explicit PlanSearch(const PlanProblem& problem) : p_(problem) {}
  virtual ~PlanSearch() = default;
  PlanSearch(const PlanSearch&) = delete;
  PlanSearch& operator=(const PlanSearch&) = delete;

  // The workspace of the plan that audits the far field, which comes after everything else.
  void reserve_audit(std::size_t bytes) { audit_bytes_ = bytes; }

  // Why the kernel has no plan of a kind whose mathematics serve the features; empty if it has.
  virtual std::string refusal(PlanKind kind) const = 0;
  // The kernel keeps the logits of a chunk: its one plan with gradients is dense.
  virtual bool keeps_logits() const { return false; }
  // What the plan of an audit may take; the least plan where none is as small.
  virtual std::size_t audit_budget() const { return 1; }

  // The fastest sizes that fit into the budget, or nearly; where none fit, those that take least.
  virtual SizedPlan best(PlanKind kind, std::size_t budget) const = 0;
  // Passes over tokens * vocab * dim multiply-adds.
  virtual double passes(PlanKind kind, const PlanSizes& sizes) const = 0;
  virtual double seconds(PlanKind kind, const PlanSizes& sizes) const = 0;
  // Whether exp(z) of the whole vocabulary is kept by a stored plan, which is the dense one then.
  virtual bool stores_all(const PlanSizes&) const { return false; }

  // What is big in a workspace, in words; empty: not said.
  virtual std::string contents(PlanKind, const SizedPlan&) const { return {}; }
  // Bytes of it that a 16-bit d_weight keeps of its sums over several chunks.
  virtual std::size_t weight_sums(PlanKind, const PlanSizes&) const { return 0; }

 protected:
  PlanProblem p_;
  std::size_t audit_bytes_ = 0;
};

// For the device of the request. Sets kernel, kernel_reasons and threads of `plan`. Throws
// Unsupported when no kernel takes the head.
std::unique_ptr<PlanSearch> make_search(const PlanProblem& problem, const DeviceLimits& device,
                                        LossPlan& plan);

// The fastest of what fits into a budget; of none that fits, the least.
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

// The last of [low, high) that holds, of a condition that holds up to some number; low where none
// does.
template <typename Holds>
std::int64_t last_that(std::int64_t low, std::int64_t high, Holds holds) {
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

// Of a stored plan: the fraction asked for, in whole tiles.
inline std::int64_t stored_tiles(double fraction, std::int64_t tiles) {
  return std::clamp<std::int64_t>(std::llround(fraction * static_cast<double>(tiles)), 1, tiles);
}

}  // namespace logitless

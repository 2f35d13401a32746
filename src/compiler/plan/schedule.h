// Orders steps so that the peak of memory is low.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "compiler/ir/lists.h"

namespace logitless::ir {

// Steps and the values that they name. A value is live from the first to the last step that names
// it.
struct Schedule {
  using Take = std::pair<int, int>;
  std::vector<std::int64_t> bytes;  // by value
  // Lists by step, in an allowed order:
  Lists<int> values;  // values that it reads or writes, without duplicates
  Lists<int> after;   // steps that must run before it
  // {a, b}: if a step is the last of a and the first of b, b reuses a's memory of equal size.
  Lists<Take> takes;

  std::size_t steps() const { return values.size(); }
  void add(std::span<const int> values_of, std::span<const int> after_of,
           std::span<const Take> takes_of) {
    values.add(values_of);
    after.add(after_of);
    takes.add(takes_of);
  }
};

// Returns the peak of live bytes when steps run in this order.
std::int64_t peak_of(const Schedule& schedule, const std::vector<int>& order);

// Returns an order with a peak no higher than that of the given order, which is the fallback.
//
// Up to 64 steps are ordered optimally, unless too many sets of steps are possible (kMostSets).
// With more steps, those that free memory run early and those that take memory run late. Windows
// around the peak are then ordered optimally.
std::vector<int> order_of_least_peak(const Schedule& schedule);

}  // namespace logitless::ir

// In which order steps run, so that little memory is needed at once.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "compiler/ir/lists.h"

namespace logitless::ir {

// Steps and the values they name. A value lives from the first step that names it to the last.
struct Schedule {
  using Take = std::pair<int, int>;
  std::vector<std::int64_t> bytes;  // of each value
  // Of each step, in an order that is one of those allowed:
  Lists<int> values;  // that it reads or writes, each once
  Lists<int> after;   // steps that run before it
  // {a, b}: where it is the last step of a and the first of b, b takes a's memory: as many bytes.
  Lists<Take> takes;

  std::size_t steps() const { return values.size(); }
  void add(std::span<const int> values_of, std::span<const int> after_of,
           std::span<const Take> takes_of) {
    values.add(values_of);
    after.add(after_of);
    takes.add(takes_of);
  }
};

// The most bytes that live at once when steps run in this order.
std::int64_t peak_of(const Schedule& schedule, const std::vector<int>& order);

// An order whose peak is no higher than the given one's, which stays where none lower is found.
// The optimum of up to 64 steps, unless there are too many sets of steps that could have run at
// some time (kMostSets in the source). More steps: those that free memory run early, those that
// take some late, and stretches around the peak are ordered by themselves.
std::vector<int> order_of_least_peak(const Schedule& schedule);

}  // namespace logitless::ir

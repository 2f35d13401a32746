// Orders steps, and with them instructions, so that the peak of memory is low.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "compiler/ir/lists.h"
#include "compiler/plan/program.h"

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

// --- order_for_memory.cpp

// Returns the instructions as steps and the arena's buffers as values. An instruction that writes
// memory keeps its order relative to all accesses to that memory, the caller's included. So results
// have the same bits in every order. Scratch of kernels does not count, so that the order does not
// depend on threads.
Schedule schedule_of(const Program& program);

// Reorders the instructions if the arena's values then take less memory, and plans memory
// (plan_memory). Instructions are moved, not changed: fusions, accumulations and writes in place
// stay. Call it after the last instruction, before memory is planned.
void order_for_memory(Program& program);

}  // namespace logitless::ir

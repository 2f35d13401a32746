// Assigns buffers to offsets in one arena.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/plan/program.h"

namespace logitless::ir {

struct Interval {
  std::int64_t bytes = 0;
  int first = 0, last = 0;  // inclusive
  std::int64_t offset = 0;  // output of assign_offsets()
};

// Assigns the lowest offsets that are multiples of `alignment`, by decreasing size. Intervals that
// overlap in time do not overlap in memory. Returns the bytes of the arena.
std::int64_t assign_offsets(std::vector<Interval>& intervals, std::int64_t alignment);

// Returns the operands whose memory the result of a loop may reuse. They end there, and each
// element is read only where the result's element is written.
std::vector<int> replaceable(const Program& program, const Pointwise& loop);

// Computes lifetimes from the instructions, and the bytes of values in the arena. Values reuse the
// memory of operands, and of the program's results that are made later.
void plan_memory(Program& program);
// Moves the instructions into this order if the values then take less memory, and plans memory.
// Returns whether they were moved.
bool plan_memory(Program& program, const std::vector<int>& order);

// Assigns the offsets of a program with planned memory, and the size of its arena.
void give_offsets(Program& program);

// The bytes that count for a buffer: all, or only those that do not depend on threads.
enum class Counted : std::uint8_t { all, values };
// Returns the buffers that own memory of the arena while instruction i runs, the biggest first.
std::vector<int> live_at(const Program& program, int instruction, Counted counted = Counted::all);
// Returns the live bytes of the arena at each instruction.
std::vector<std::int64_t> live_bytes(const Program& program, Counted counted = Counted::all);

}  // namespace logitless::ir

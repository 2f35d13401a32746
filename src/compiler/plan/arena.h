// Offsets of buffers in one arena.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/plan/program.h"

namespace logitless::ir {

struct Interval {
  std::int64_t bytes = 0;
  int first = 0, last = 0;  // both included
  std::int64_t offset = 0;  // the result
};

// Lowest offsets by decreasing size, multiples of `alignment`; intervals that meet in time do not
// in memory. Returns the bytes of the arena.
std::int64_t assign_offsets(std::vector<Interval>& intervals, std::int64_t alignment);

// The operands whose memory the result of a loop may take where they end and it begins: read
// element for element where the result is written, and in no other way.
std::vector<int> replaceable(const Program& program, const Pointwise& loop);

// Lifetimes from the instructions, memory shared where a result may replace an operand that ends,
// and the bytes of values.
void plan_memory(Program& program);
// The same with the instructions in this order if the values then take less than in the one they
// have, else without moving them. Returns whether they were moved.
bool plan_memory(Program& program, const std::vector<int>& order);

// Of a program whose memory is planned: offsets, and the size of the arena.
void give_offsets(Program& program);

// What is counted of a buffer: all its bytes, or those that no number of threads changes.
enum class Counted : std::uint8_t { all, values };
// What lives while instruction i runs, biggest first: buffers that own memory.
std::vector<int> live_at(const Program& program, int instruction, Counted counted = Counted::all);
// Bytes that live while each instruction runs.
std::vector<std::int64_t> live_bytes(const Program& program, Counted counted = Counted::all);

}  // namespace logitless::ir

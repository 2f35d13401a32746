#include "compiler/plan/arena.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace logitless::ir {
namespace {

std::int64_t aligned(std::int64_t bytes, std::int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

int owner(const Program& program, int buffer) {
  while (program.buffers[static_cast<std::size_t>(buffer)].shared_with >= 0)
    buffer = program.buffers[static_cast<std::size_t>(buffer)].shared_with;
  return buffer;
}

// The operand whose memory the result of a pointwise instruction takes, or -1.
int replaced(const Program& program, const Pointwise& p, int instruction) {
  const Buffer& to = program.buffers[static_cast<std::size_t>(p.store.view.buffer)];
  for (const int operand : replaceable(program, p)) {
    const Buffer& from = program.buffers[static_cast<std::size_t>(operand)];
    if (from.last == instruction && to.first == instruction) return operand;
  }
  return -1;
}

}  // namespace

std::vector<int> replaceable(const Program& program, const Pointwise& p) {
  std::vector<int> operands;
  if (p.reduction || p.store.accumulate) return operands;
  const View& out = p.store.view;
  const Buffer& to = program.buffers[static_cast<std::size_t>(out.buffer)];
  for (const Pointwise::Leaf& leaf : p.leaves) {
    if (leaf.kind != Pointwise::Leaf::Kind::memory) continue;
    const Buffer& from = program.buffers[static_cast<std::size_t>(leaf.view.buffer)];
    const bool same = size_of(leaf.view.dtype) == size_of(out.dtype) &&
                      leaf.view.offset == out.offset && leaf.view.strides == out.strides &&
                      from.bytes == to.bytes;
    if (!same || from.place != Place::arena || to.place != Place::arena) continue;
    if (leaf.view.buffer == out.buffer) continue;
    const bool otherwise =
        std::any_of(p.leaves.begin(), p.leaves.end(), [&](const Pointwise::Leaf& other) {
          return other.kind == Pointwise::Leaf::Kind::memory &&
                 other.view.buffer == leaf.view.buffer &&
                 (other.view.strides != out.strides || other.view.offset != out.offset);
        });
    if (!otherwise) operands.push_back(leaf.view.buffer);
  }
  return operands;
}

std::int64_t assign_offsets(std::vector<Interval>& intervals, std::int64_t alignment) {
  std::vector<std::size_t> order(intervals.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return intervals[a].bytes > intervals[b].bytes;
  });
  struct Placed {
    int first, last;
    std::int64_t begin, end;
  };
  std::vector<Placed> placed;  // by begin
  placed.reserve(intervals.size());
  std::int64_t total = 0;
  for (const std::size_t i : order) {
    Interval& x = intervals[i];
    const std::int64_t bytes = aligned(x.bytes, alignment);
    std::int64_t at = 0;
    for (const Placed& y : placed) {
      if (y.last < x.first || x.last < y.first) continue;
      if (y.begin >= at + bytes) break;
      at = std::max(at, y.end);
    }
    x.offset = at;
    total = std::max(total, at + bytes);
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), at,
                         [](std::int64_t begin, const Placed& y) { return begin < y.begin; }),
        {x.first, x.last, at, at + bytes});
  }
  return total;
}

void plan_memory(Program& program) {
  for (Buffer& b : program.buffers) {
    b.first = b.last = b.shared_with = -1;
  }
  const auto touch = [&](int buffer, int at) {
    Buffer& b = program.buffers[static_cast<std::size_t>(buffer)];
    if (b.first < 0) b.first = at;
    b.last = at;
  };
  const int count = static_cast<int>(program.instructions.size());
  for (int i = 0; i < count; ++i) {
    const Instruction& instruction = program.instructions[static_cast<std::size_t>(i)];
    for (const int b : reads_of(instruction)) touch(b, i);
    for (const int b : writes_of(instruction)) touch(b, i);
  }
  for (int i = 0; i < count; ++i) {
    const auto* loop =
        std::get_if<Pointwise>(&program.instructions[static_cast<std::size_t>(i)].what);
    const int from = loop != nullptr ? replaced(program, *loop, i) : -1;
    if (from >= 0)
      program.buffers[static_cast<std::size_t>(loop->store.view.buffer)].shared_with = from;
  }
  std::vector<Interval> intervals;
  std::vector<int> slot(program.buffers.size(), -1);
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& buffer = program.buffers[b];
    if (buffer.place != Place::arena || buffer.first < 0) continue;
    const auto own = static_cast<std::size_t>(owner(program, static_cast<int>(b)));
    if (slot[own] < 0) {
      slot[own] = static_cast<int>(intervals.size());
      intervals.push_back({buffer.bytes, buffer.first, buffer.last, 0});
    }
    Interval& interval = intervals[static_cast<std::size_t>(slot[own])];
    interval.bytes = std::max(interval.bytes, buffer.bytes);
    interval.first = std::min(interval.first, buffer.first);
    interval.last = std::max(interval.last, buffer.last);
  }
  std::vector<Interval> values = intervals;
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    if (slot[b] >= 0)
      values[static_cast<std::size_t>(slot[b])].bytes = program.buffers[b].value_bytes;
  }
  program.value_bytes = assign_offsets(values, program.alignment);
  const auto pointers = static_cast<std::int64_t>(program.buffers.size() * sizeof(void*));
  program.arena_bytes =
      assign_offsets(intervals, program.alignment) + aligned(pointers, program.alignment);
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const auto own = static_cast<std::size_t>(owner(program, static_cast<int>(b)));
    if (slot[own] >= 0)
      program.buffers[b].offset = intervals[static_cast<std::size_t>(slot[own])].offset;
  }
}

namespace {

std::int64_t bytes_of(const Buffer& buffer, Counted counted) {
  return counted == Counted::all ? buffer.bytes : buffer.value_bytes;
}

}  // namespace

std::vector<int> live_at(const Program& program, int instruction, Counted counted) {
  std::vector<int> live;
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& x = program.buffers[b];
    if (x.place != Place::arena || x.first < 0 || x.first > instruction || x.last < instruction)
      continue;
    // Memory handed over counts once, under its new name.
    const bool handed =
        x.last == instruction &&
        std::any_of(program.buffers.begin(), program.buffers.end(), [&](const Buffer& y) {
          return y.shared_with == static_cast<int>(b) && y.first == instruction;
        });
    if (!handed) live.push_back(static_cast<int>(b));
  }
  std::stable_sort(live.begin(), live.end(), [&](int a, int b) {
    return bytes_of(program.buffers[static_cast<std::size_t>(a)], counted) >
           bytes_of(program.buffers[static_cast<std::size_t>(b)], counted);
  });
  return live;
}

std::vector<std::int64_t> live_bytes(const Program& program, Counted counted) {
  std::vector<std::int64_t> change(program.instructions.size() + 1, 0);
  std::vector<bool> hands_over(program.buffers.size());
  for (const Buffer& b : program.buffers) {
    if (b.shared_with >= 0) hands_over[static_cast<std::size_t>(b.shared_with)] = true;
  }
  for (std::size_t i = 0; i < program.buffers.size(); ++i) {
    const Buffer& b = program.buffers[i];
    if (b.place != Place::arena || b.first < 0) continue;
    change[static_cast<std::size_t>(b.first)] += aligned(bytes_of(b, counted), program.alignment);
    change[static_cast<std::size_t>(b.last + (hands_over[i] ? 0 : 1))] -=
        aligned(bytes_of(b, counted), program.alignment);
  }
  std::int64_t sum = 0;
  std::vector<std::int64_t> bytes;
  for (std::size_t i = 0; i < program.instructions.size(); ++i) bytes.push_back(sum += change[i]);
  return bytes;
}

}  // namespace logitless::ir

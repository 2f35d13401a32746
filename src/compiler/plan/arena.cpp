#include "compiler/plan/arena.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace logitless::ir {
namespace {

std::int64_t aligned(std::int64_t bytes, std::int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Returns the bytes of a result's memory at multiples of the alignment, wherever it begins.
std::int64_t bytes_inside(const Buffer& result, std::int64_t alignment) {
  return (result.bytes - (alignment - 1)) / alignment * alignment;
}

int owner(const Program& program, int buffer) {
  while (program.buffers[static_cast<std::size_t>(buffer)].shared_with >= 0)
    buffer = program.buffers[static_cast<std::size_t>(buffer)].shared_with;
  return buffer;
}

// Returns the operand whose memory the result of a pointwise instruction reuses, or -1.
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

namespace {

// Intervals with assigned offsets, sorted by offset. Each level divides time into parts and lists
// the intervals of each part. A short interval is compared only with those of one or two parts.
class Placed {
 public:
  explicit Placed(int last) {
    for (const int parts : {kParts, 1}) levels_.push_back(Level(last, parts));
  }

  // Returns the lowest offset for so many bytes beside the intervals live in [first, last].
  std::int64_t lowest(int first, int last, std::int64_t bytes) const {
    const Level& level = *std::find_if(levels_.begin(), levels_.end(), [&](const Level& l) {
      return l.part(last) - l.part(first) <= 1;
    });
    const std::vector<Place>& a = level.places[level.part(first)];
    const std::vector<Place>& b = level.places[level.part(last)];
    std::int64_t at = 0;
    const auto behind = [&](const Place& y) {  // false: the gap before it is large enough
      if (y.last < first || last < y.first) return true;
      if (y.begin >= at + bytes) return false;
      at = std::max(at, y.end);
      return true;
    };
    if (&a == &b) {
      for (const Place& y : a) {
        if (!behind(y)) break;
      }
      return at;
    }
    auto x = a.begin(), y = b.begin();
    while (x != a.end() || y != b.end()) {
      const bool of_a = y == b.end() || (x != a.end() && x->begin <= y->begin);
      if (!behind(of_a ? *x++ : *y++)) break;
    }
    return at;
  }

  void add(int first, int last, std::int64_t begin, std::int64_t end) {
    for (Level& level : levels_) {
      for (std::size_t i = level.part(first); i <= level.part(last); ++i) {
        std::vector<Place>& places = level.places[i];
        places.insert(
            std::upper_bound(places.begin(), places.end(), begin,
                             [](std::int64_t at, const Place& y) { return at < y.begin; }),
            {first, last, begin, end});
      }
    }
  }

 private:
  static constexpr int kParts = 16;  // with more parts, long intervals are in many lists
  struct Place {
    int first, last;
    std::int64_t begin, end;
  };
  struct Level {
    int length;  // of a part
    std::vector<std::vector<Place>> places;
    Level(int last, int parts) : length(last / parts + 1) { places.resize(part(last) + 1); }
    std::size_t part(int at) const { return static_cast<std::size_t>(at / length); }
  };
  std::vector<Level> levels_;
};

}  // namespace

std::int64_t assign_offsets(std::vector<Interval>& intervals, std::int64_t alignment) {
  std::vector<std::size_t> order(intervals.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return intervals[a].bytes > intervals[b].bytes;
  });
  int last = 0;
  for (const Interval& x : intervals) last = std::max(last, x.last);
  Placed placed(last);
  std::int64_t total = 0;
  for (const std::size_t i : order) {
    Interval& x = intervals[i];
    const std::int64_t bytes = aligned(x.bytes, alignment);
    x.offset = placed.lowest(x.first, x.last, bytes);
    total = std::max(total, x.offset + bytes);
    placed.add(x.first, x.last, x.offset, x.offset + bytes);
  }
  return total;
}

namespace {

void find_lifetimes(Program& program) {
  for (Buffer& b : program.buffers) {
    b.first = b.last = b.shared_with = -1;
  }
  const int count = static_cast<int>(program.instructions.size());
  std::vector<int> named;
  for (int i = 0; i < count; ++i) {
    const Instruction& instruction = program.instructions[static_cast<std::size_t>(i)];
    named.clear();
    add_reads_of(instruction, named);
    add_writes_of(instruction, named);
    for (const int buffer : named) {
      Buffer& b = program.buffers[static_cast<std::size_t>(buffer)];
      if (b.first < 0) b.first = i;
      b.last = i;
    }
  }
  for (int i = 0; i < count; ++i) {
    const auto* loop =
        std::get_if<Pointwise>(&program.instructions[static_cast<std::size_t>(i)].what);
    const int from = loop != nullptr ? replaced(program, *loop, i) : -1;
    if (from >= 0)
      program.buffers[static_cast<std::size_t>(loop->store.view.buffer)].shared_with = from;
  }
}

// Buffers with separate memory, and those that reuse it.
struct Intervals {
  std::vector<Interval> list;
  // Intervals by buffer; -1: it shares another buffer's memory, or needs none in the arena.
  std::vector<int> slot;
};
Intervals intervals_of(const Program& program) {
  Intervals intervals{{}, std::vector<int>(program.buffers.size(), -1)};
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& buffer = program.buffers[b];
    if (buffer.place != Place::arena || buffer.first < 0 || buffer.inside >= 0) continue;
    int& slot = intervals.slot[static_cast<std::size_t>(owner(program, static_cast<int>(b)))];
    if (slot < 0) {
      slot = static_cast<int>(intervals.list.size());
      intervals.list.push_back({buffer.bytes, buffer.first, buffer.last, 0});
    }
    Interval& interval = intervals.list[static_cast<std::size_t>(slot)];
    interval.bytes = std::max(interval.bytes, buffer.bytes);
    interval.first = std::min(interval.first, buffer.first);
    interval.last = std::max(interval.last, buffer.last);
  }
  return intervals;
}

// Moves buffers into the memory of results that are made later, the biggest first, each into the
// smallest result that has room.
void use_results(Program& program) {
  std::vector<int> results;
  int last = 0;
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    Buffer& buffer = program.buffers[b];
    buffer.inside = -1;
    last = std::max(last, buffer.last);
    if (buffer.overwritten && buffer.first > 0 && bytes_inside(buffer, program.alignment) > 0)
      results.push_back(static_cast<int>(b));
  }
  if (results.empty()) return;
  const auto bytes_of = [&](int result) {
    return program.buffers[static_cast<std::size_t>(result)].bytes;
  };
  std::stable_sort(results.begin(), results.end(),
                   [&](int a, int b) { return bytes_of(a) < bytes_of(b); });
  std::vector<Placed> placed(results.size(), Placed(last));
  const Intervals intervals = intervals_of(program);
  std::vector<int> owners;
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    if (intervals.slot[b] >= 0) owners.push_back(static_cast<int>(b));
  }
  const auto interval_of = [&](int buffer) -> const Interval& {
    return intervals
        .list[static_cast<std::size_t>(intervals.slot[static_cast<std::size_t>(buffer)])];
  };
  std::stable_sort(owners.begin(), owners.end(),
                   [&](int a, int b) { return interval_of(a).bytes > interval_of(b).bytes; });
  for (const int of : owners) {
    const Interval& x = interval_of(of);
    const std::int64_t bytes = aligned(x.bytes, program.alignment);
    for (std::size_t r = 0; r < results.size(); ++r) {
      const Buffer& result = program.buffers[static_cast<std::size_t>(results[r])];
      const std::int64_t room = bytes_inside(result, program.alignment);
      if (x.last >= result.first || bytes > room) continue;
      const std::int64_t at = placed[r].lowest(x.first, x.last, bytes);
      if (at + bytes > room) continue;
      placed[r].add(x.first, x.last, at, at + bytes);
      Buffer& buffer = program.buffers[static_cast<std::size_t>(of)];
      buffer.inside = results[r];
      buffer.offset = at;
      break;
    }
  }
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& memory =
        program.buffers[static_cast<std::size_t>(owner(program, static_cast<int>(b)))];
    program.buffers[b].inside = memory.inside;
    if (memory.inside >= 0) program.buffers[b].offset = memory.offset;
  }
}

std::int64_t value_bytes_of(const Program& program) {
  Intervals intervals = intervals_of(program);
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    if (const int slot = intervals.slot[b]; slot >= 0)
      intervals.list[static_cast<std::size_t>(slot)].bytes = program.buffers[b].value_bytes;
  }
  return assign_offsets(intervals.list, program.alignment);
}

void permute(std::vector<Instruction>& instructions, const std::vector<int>& order) {
  std::vector<Instruction> moved;
  moved.reserve(order.size());
  for (const int i : order) moved.push_back(std::move(instructions[static_cast<std::size_t>(i)]));
  instructions = std::move(moved);
}

}  // namespace

void plan_memory(Program& program) {
  find_lifetimes(program);
  use_results(program);
  program.value_bytes = value_bytes_of(program);
}

bool plan_memory(Program& program, const std::vector<int>& order) {
  find_lifetimes(program);
  use_results(program);
  const std::vector<std::int64_t> live = live_bytes(program, Counted::values);
  permute(program.instructions, order);
  plan_memory(program);
  const std::int64_t value_bytes = program.value_bytes;
  // The old order needs at least its live bytes, at any offsets.
  if (value_bytes < *std::max_element(live.begin(), live.end())) return true;
  std::vector<int> back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    back[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  permute(program.instructions, back);
  plan_memory(program);
  if (value_bytes >= program.value_bytes) return false;
  permute(program.instructions, order);
  find_lifetimes(program);
  use_results(program);
  program.value_bytes = value_bytes;
  return true;
}

void give_offsets(Program& program) {
  Intervals intervals = intervals_of(program);
  const auto pointers = static_cast<std::int64_t>(program.buffers.size() * sizeof(void*));
  program.arena_bytes =
      assign_offsets(intervals.list, program.alignment) + aligned(pointers, program.alignment);
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const int slot = intervals.slot[static_cast<std::size_t>(owner(program, static_cast<int>(b)))];
    if (slot >= 0)
      program.buffers[b].offset = intervals.list[static_cast<std::size_t>(slot)].offset;
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
    if (x.place != Place::arena || x.inside >= 0 || x.first < 0 || x.first > instruction ||
        x.last < instruction)
      continue;
    // Reused memory counts once, for its new owner.
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
    if (b.place != Place::arena || b.inside >= 0 || b.first < 0) continue;
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

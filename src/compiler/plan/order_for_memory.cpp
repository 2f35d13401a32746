#include <algorithm>
#include <set>
#include <utility>

#include "compiler/plan/arena.h"
#include "compiler/plan/schedule.h"

namespace logitless::ir {
namespace {

// Collects the slots of a loop's body that a chunk writes.
void note_written(const Program& body, std::set<int>& slots) {
  for (const Instruction& instruction : body.instructions) {
    for (const int b : writes_of(instruction)) {
      const Buffer& buffer = body.buffers[static_cast<std::size_t>(b)];
      if (buffer.place == Place::external) slots.insert(buffer.slot);
    }
  }
}

// writes_of() without buffers that a loop only reads.
void add_written_by(const Instruction& instruction, std::vector<int>& buffers) {
  const auto* loop = std::get_if<LoopRun>(&instruction.what);
  if (loop == nullptr) return add_writes_of(instruction, buffers);
  std::set<int> slots;
  note_written(*loop->body, slots);
  if (loop->tail != nullptr) note_written(*loop->tail, slots);
  for (const int slot : slots)
    buffers.push_back(loop->slices[static_cast<std::size_t>(slot)].outer);
  if (loop->arena >= 0) buffers.push_back(loop->arena);
}

void make_unique(std::vector<int>& list) {
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
}

// Finds the steps that each instruction must follow, in program order.
class Accesses {
 public:
  explicit Accesses(std::size_t buffers) : accesses_(buffers) {}

  const std::vector<int>& before(const Instruction& instruction, int i) {
    read_.clear();
    add_reads_of(instruction, read_);
    make_unique(read_);
    written_.clear();
    add_written_by(instruction, written_);
    make_unique(written_);
    before_.clear();
    for (const int b : read_) {
      Access& a = accesses_[static_cast<std::size_t>(b)];
      if (a.writer >= 0) before_.push_back(a.writer);
      if (!std::binary_search(written_.begin(), written_.end(), b)) a.readers.push_back(i);
    }
    for (const int b : written_) {
      Access& a = accesses_[static_cast<std::size_t>(b)];
      if (a.writer >= 0) before_.push_back(a.writer);
      before_.insert(before_.end(), a.readers.begin(), a.readers.end());
      a.writer = i;
      a.readers.clear();
    }
    make_unique(before_);
    return before_;
  }

 private:
  // The last writer of a buffer, and its readers since.
  struct Access {
    int writer = -1;
    std::vector<int> readers;
  };
  std::vector<Access> accesses_;
  std::vector<int> read_, written_, before_;
};

}  // namespace

Schedule schedule_of(const Program& program) {
  Schedule schedule;
  std::vector<int> value(program.buffers.size(), -1);
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const Buffer& buffer = program.buffers[b];
    if (buffer.place != Place::arena || buffer.value_bytes == 0) continue;
    value[b] = static_cast<int>(schedule.bytes.size());
    const std::int64_t blocks = (buffer.value_bytes + program.alignment - 1) / program.alignment;
    schedule.bytes.push_back(blocks * program.alignment);
  }
  Accesses accesses(program.buffers.size());
  std::vector<int> named, values;
  std::vector<Schedule::Take> takes;
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    named.clear();
    add_reads_of(instruction, named);
    add_writes_of(instruction, named);
    make_unique(named);
    values.clear();
    for (const int b : named) {
      const int v = value[static_cast<std::size_t>(b)];
      if (v >= 0) values.push_back(v);
    }
    takes.clear();
    if (const auto* loop = std::get_if<Pointwise>(&instruction.what); loop != nullptr) {
      const int to = value[static_cast<std::size_t>(loop->store.view.buffer)];
      for (const int operand : replaceable(program, *loop)) {
        const int from = value[static_cast<std::size_t>(operand)];
        if (from >= 0 && to >= 0) takes.emplace_back(from, to);
      }
    }
    schedule.add(values, accesses.before(instruction, static_cast<int>(i)), takes);
  }
  return schedule;
}

void order_for_memory(Program& program) {
  const std::vector<int> order = order_of_least_peak(schedule_of(program));
  if (std::is_sorted(order.begin(), order.end())) {
    plan_memory(program);
  } else {
    plan_memory(program, order);
  }
}

}  // namespace logitless::ir

#include "compiler/plan/order_for_memory.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "compiler/plan/arena.h"

namespace logitless::ir {
namespace {

// By slot of a loop's body: whether a chunk writes there.
void note_written(const Program& body, std::set<int>& slots) {
  for (const Instruction& instruction : body.instructions) {
    for (const int b : writes_of(instruction)) {
      const Buffer& buffer = body.buffers[static_cast<std::size_t>(b)];
      if (buffer.place == Place::external) slots.insert(buffer.slot);
    }
  }
}

// writes_of() without what a loop only reads.
std::vector<int> written_by(const Instruction& instruction) {
  const auto* loop = std::get_if<LoopRun>(&instruction.what);
  if (loop == nullptr) return writes_of(instruction);
  std::set<int> slots;
  note_written(*loop->body, slots);
  if (loop->tail != nullptr) note_written(*loop->tail, slots);
  std::vector<int> buffers;
  for (const int slot : slots)
    buffers.push_back(loop->slices[static_cast<std::size_t>(slot)].outer);
  if (loop->arena >= 0) buffers.push_back(loop->arena);
  return buffers;
}

std::vector<int> unique(std::vector<int> list) {
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
  return list;
}

// Who wrote a buffer last, and who has read it since.
struct Accesses {
  int writer = -1;
  std::vector<int> readers;
};

// The steps that instruction i must follow.
std::vector<int> steps_before(const Instruction& instruction, int i,
                              std::vector<Accesses>& accesses) {
  std::vector<int> before;
  const std::vector<int> written = unique(written_by(instruction));
  for (const int b : unique(reads_of(instruction))) {
    Accesses& a = accesses[static_cast<std::size_t>(b)];
    if (a.writer >= 0) before.push_back(a.writer);
    if (!std::binary_search(written.begin(), written.end(), b)) a.readers.push_back(i);
  }
  for (const int b : written) {
    Accesses& a = accesses[static_cast<std::size_t>(b)];
    if (a.writer >= 0) before.push_back(a.writer);
    before.insert(before.end(), a.readers.begin(), a.readers.end());
    a = {i, {}};
  }
  return unique(std::move(before));
}

void permute(std::vector<Instruction>& instructions, const std::vector<int>& order) {
  std::vector<Instruction> moved;
  moved.reserve(order.size());
  for (const int i : order) moved.push_back(std::move(instructions[static_cast<std::size_t>(i)]));
  instructions = std::move(moved);
}

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
  std::vector<Accesses> accesses(program.buffers.size());
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    Schedule::Step& step = schedule.steps.emplace_back();
    step.after = steps_before(instruction, static_cast<int>(i), accesses);
    std::vector<int> named = reads_of(instruction);
    const std::vector<int> written = writes_of(instruction);
    named.insert(named.end(), written.begin(), written.end());
    for (const int b : unique(std::move(named))) {
      const int v = value[static_cast<std::size_t>(b)];
      if (v >= 0) step.values.push_back(v);
    }
    const auto* loop = std::get_if<Pointwise>(&instruction.what);
    if (loop == nullptr) continue;
    const int to = value[static_cast<std::size_t>(loop->store.view.buffer)];
    for (const int operand : replaceable(program, *loop)) {
      const int from = value[static_cast<std::size_t>(operand)];
      if (from >= 0 && to >= 0) step.takes.emplace_back(from, to);
    }
  }
  return schedule;
}

void order_for_memory(Program& program) {
  const std::vector<int> order = order_of_least_peak(schedule_of(program));
  plan_memory(program);
  if (std::is_sorted(order.begin(), order.end())) return;
  const std::int64_t given = program.value_bytes;
  permute(program.instructions, order);
  plan_memory(program);
  if (program.value_bytes < given) return;
  std::vector<int> back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    back[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  permute(program.instructions, back);
  plan_memory(program);
}

}  // namespace logitless::ir

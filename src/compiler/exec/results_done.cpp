#include "compiler/exec/results_done.h"

namespace logitless::ir {
namespace {

// Returns the buffer that owns the memory.
int memory_of(const Program& program, int buffer) {
  for (;;) {
    const int other = program.buffers[static_cast<std::size_t>(buffer)].shared_with;
    if (other < 0) return buffer;
    buffer = other;
  }
}

}  // namespace

ResultsDone::ResultsDone(const Program& program, const std::function<void(std::size_t)>& done)
    : done_(done) {
  std::vector<const Instruction*> last(program.buffers.size(), nullptr);
  std::vector<int> touched;
  for (const Instruction& instruction : program.instructions) {
    touched.clear();
    add_reads_of(instruction, touched);
    add_writes_of(instruction, touched);
    for (const int buffer : touched)
      last[static_cast<std::size_t>(memory_of(program, buffer))] = &instruction;
  }
  for (std::size_t r = 0; r < program.results.size(); ++r) {
    const Instruction* const at =
        last[static_cast<std::size_t>(memory_of(program, program.results[r]))];
    if (at == nullptr) {
      untouched_.push_back(r);
    } else {
      last_[at].push_back(r);
    }
  }
}

void ResultsDone::after(const Instruction& instruction) {
  const auto found = last_.find(&instruction);
  if (found == last_.end()) return;
  for (const std::size_t result : found->second) done_(result);
}

void ResultsDone::end() const {
  for (const std::size_t result : untouched_) done_(result);
}

}  // namespace logitless::ir

// Times each kind of instruction of a program.
#include <algorithm>
#include <chrono>
#include <map>

#include "compiler/compiled.h"
#include "compiler/plan/cost.h"
#include "core/check.h"

namespace logitless {
namespace {

// Merges instructions of one kind and sorts them by their time, the longest first.
std::vector<InstructionTime> merged(const ir::Timed& timed, int repeat) {
  std::map<std::string, InstructionTime> kinds;
  for (std::size_t i = 0; i < timed.instructions.size(); ++i) {
    const ir::Instruction& instruction = *timed.instructions[i];
    InstructionTime& kind = kinds[ir::describe(instruction)];
    if (kind.count++ == 0) kind.name = instruction.name;
    kind.seconds += timed.seconds[i] / repeat;
    kind.bytes += ir::bytes_moved(instruction);
    kind.flops += ir::flops_of(instruction);
  }
  std::vector<InstructionTime> list;
  for (auto& [what, kind] : kinds) {
    kind.what = what;
    list.push_back(std::move(kind));
  }
  std::stable_sort(
      list.begin(), list.end(),
      [](const InstructionTime& a, const InstructionTime& b) { return a.seconds > b.seconds; });
  return list;
}

class HostClock final : public ir::Observer {
 public:
  void start() {
    next_ = 0;
    last_ = Clock::now();
  }
  void after(const ir::Instruction& instruction) final {
    const Clock::time_point now = Clock::now();
    if (next_ == timed.instructions.size()) {
      timed.instructions.push_back(&instruction);
      timed.seconds.push_back(0.0);
    }
    timed.seconds[next_++] += std::chrono::duration<double>(now - last_).count();
    last_ = Clock::now();
  }
  ir::Timed timed;

 private:
  using Clock = std::chrono::steady_clock;
  std::size_t next_ = 0;
  Clock::time_point last_;
};

void check_repeat(int repeat) {
  require(repeat >= 1, "profile: repeat is ", repeat, ", expected 1 or more");
}

}  // namespace

std::vector<InstructionTime> CompiledProgram::profile(std::span<const void* const> parameters,
                                                      std::span<void* const> results, void* arena,
                                                      int repeat) const {
  check_repeat(repeat);
  run(parameters, results, arena);  // checks the arguments, and warms up
  HostClock clock;
  for (int r = 0; r < repeat; ++r) {
    clock.start();
    state_->backend->run(state_->program, parameters, results, static_cast<std::byte*>(arena), {},
                         &clock);
  }
  return merged(clock.timed, repeat);
}

std::vector<InstructionTime> PreparedProgram::profile(std::span<const void* const> parameters,
                                                      std::span<void* const> results, void* arena,
                                                      int repeat) const {
  check_repeat(repeat);
  check_device_pointers(*state_->program, parameters, results, arena);
  return merged(state_->prepared->time(parameters, results, static_cast<std::byte*>(arena), repeat),
                repeat);
}

}  // namespace logitless

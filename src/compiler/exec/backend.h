// What runs lowered programs on a machine.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "compiler/plan/program.h"
#include "logitless/far_field.h"
#include "logitless/head_over_ranks.h"

namespace logitless::ir {

// Told of instructions in the order in which they run: of those of a loop's body in each round, and
// of the loop when all rounds are over.
class Observer {
 public:
  virtual ~Observer() = default;
  // It has run, or is enqueued.
  virtual void after(const Instruction& instruction) = 0;
  virtual void after_loop(const Instruction& loop) { (void)loop; }
};

// What the head of a run is under: at most one of them; none: as it was compiled.
struct HeadUnder {
  FarFieldHead* far = nullptr;            // for far_head()
  HeadOverRanks::State* ranks = nullptr;  // of the program
  bool skipped = false;                   // heads do not run
};

// Instructions in the order of an Observer, with the seconds that each took, summed over runs.
struct Timed {
  std::vector<const Instruction*> instructions;
  std::vector<double> seconds;
};

// A program made ready for the current device.
class Prepared {
 public:
  virtual ~Prepared() = default;

  // Backend::run's pointers, of the device. Enqueues on the stream; neither waits nor allocates.
  virtual void run(std::span<const void* const> parameters, std::span<void* const> results,
                   std::byte* arena, void* stream, Observer* observer = nullptr) const = 0;
  // The same on the stream of far's context; far decides what far_head() does, and steps that
  // something is decided in wait and may allocate. Throws Unsupported where there is no such head.
  virtual void run(std::span<const void* const> parameters, std::span<void* const> results,
                   std::byte* arena, FarFieldHead& far) const = 0;
  // The same as the first with the head over ranks. Throws InvalidArgument where that is of another
  // program. Its first run may allocate.
  virtual void run(std::span<const void* const> parameters, std::span<void* const> results,
                   std::byte* arena, void* stream, HeadOverRanks::State& ranks,
                   Observer* observer) const = 0;
  // The same as the first without its heads: nothing holds numbers afterwards.
  virtual void run_without_heads(std::span<const void* const> parameters,
                                 std::span<void* const> results, std::byte* arena,
                                 void* stream) const = 0;

  // Runs it repeat + 2 times on a stream of its own, `repeat` of them timed, and waits.
  virtual Timed time(std::span<const void* const> parameters, std::span<void* const> results,
                     std::byte* arena, int repeat) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // parameters and results in the order of the program; arena of arena_bytes, aligned as the
  // program says. Several threads may run one program, each in an arena of its own. Throws
  // Unsupported where there is no head for under.far, InvalidArgument where under.ranks is of
  // another program.
  virtual void run(const Program& program, std::span<const void* const> parameters,
                   std::span<void* const> results, std::byte* arena, const HeadUnder& under,
                   Observer* observer = nullptr) const = 0;

  // The plan of the program's audited steps under `far`. Throws as run() does.
  virtual LossPlan far_plan(const Program& program, const FarFieldHead& far) const = 0;

  // Plans what `ranks` has but for its plan, and says what workspace it takes. Collective.
  virtual void plan(HeadOverRanks::State& ranks, std::size_t memory_budget) const = 0;

  // The program must outlive what is made. Throws InvalidArgument where run() is for the host.
  virtual std::unique_ptr<const Prepared> prepare(const Program& program,
                                                  const Context& context) const = 0;
};

// The program's heads, in order. Throws Unsupported where there is none.
std::vector<const Instruction*> heads_of(const Program& program);

// The one head of the program that may take the far field. Throws Unsupported, saying why there is
// none.
const HeadRun& far_head(const Program& program);

}  // namespace logitless::ir

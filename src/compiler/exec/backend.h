// The interface of a backend, which runs lowered programs on one kind of device.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "compiler/plan/program.h"
#include "logitless/far_field.h"
#include "logitless/head_over_ranks.h"

namespace logitless::ir {

// Is notified of instructions in the order in which they run. The instructions of a loop's body are
// reported in each round, and the loop itself after its last round.
class Observer {
 public:
  virtual ~Observer() = default;
  // The instruction has run, or is enqueued.
  virtual void after(const Instruction& instruction) = 0;
  virtual void after_loop(const Instruction& loop) { (void)loop; }
};

// How the heads of a run are executed; at most one field is set, and none means as compiled.
struct HeadUnder {
  FarFieldHead* far = nullptr;            // runs far_head() with the far field
  HeadOverRanks::State* ranks = nullptr;  // runs the program's head over ranks
  bool skipped = false;                   // heads do not run
};

// The instructions in the order of an Observer and the seconds that each took, summed over runs.
struct Timed {
  std::vector<const Instruction*> instructions;
  std::vector<double> seconds;
};

// A program that is ready to run on the current device.
class Prepared {
 public:
  virtual ~Prepared() = default;

  // Enqueues a run on the stream; neither waits nor allocates. Pointers as in Backend::run, of the
  // device. `observer` may be null. Heads run as `under` says:
  // - far: on the stream of far's context, which `stream` is not; it decides how far_head() runs.
  //   Steps with a decision wait and may allocate. Throws Unsupported if there is no such head.
  // - ranks: the first run may allocate. Throws InvalidArgument if `ranks` belongs to another
  //   program.
  // - skipped: for timing; no result is valid afterwards.
  virtual void run(std::span<const void* const> parameters, std::span<void* const> results,
                   std::byte* arena, void* stream, const HeadUnder& under = {},
                   Observer* observer = nullptr) const = 0;

  // Runs it repeat + 2 times on a separate stream, times `repeat` of these runs, and waits.
  virtual Timed time(std::span<const void* const> parameters, std::span<void* const> results,
                     std::byte* arena, int repeat) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Runs the program. `parameters` and `results` are in the program's order; `arena` has
  // arena_bytes and the program's alignment. Several threads may run one program, each with its own
  // arena.
  //
  // Throws Unsupported if under.far finds no head, and InvalidArgument if under.ranks belongs to
  // another program.
  virtual void run(const Program& program, std::span<const void* const> parameters,
                   std::span<void* const> results, std::byte* arena, const HeadUnder& under,
                   Observer* observer = nullptr) const = 0;

  // Prepares a program, which must outlive the result. Throws InvalidArgument on the CPU, which has
  // run().
  virtual std::unique_ptr<const Prepared> prepare(const Program& program,
                                                  const Context& context) const = 0;
};

// Returns the program's heads, in order. Throws Unsupported if there are none.
std::vector<const Instruction*> heads_of(const Program& program);

// Returns the one head of the program that can use the far field. Throws Unsupported with the
// reason if there is none.
const HeadRun& far_head(const Program& program);

}  // namespace logitless::ir

// The head of a compiled program with its words over ranks: each rank runs the program on tokens of
// its own, and no rank has the whole weight of the head or its gradient
// (docs/distributed.md#heads-of-programs).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "logitless/context.h"
#include "logitless/export.h"
#include "logitless/plan.h"
#include "logitless/sharding.h"

namespace logitless {

class CompiledProgram;

// The program is written and compiled for the whole vocabulary, the same on all ranks. In runs
// under this the parameter that is the head's weight [V, D], its bias [V], and the results that are
// their gradients point to this rank's rows alone. What the program makes of its tokens is what it
// would make of them with all words; gradients of the rows are of the tokens of all ranks, where
// the program without ranks has those of its own: complete sums, which nobody is to add up again.
class LOGITLESS_API HeadOverRanks {
 public:
  struct State;  // the compiler's

  // Collective, as plans are: every rank makes it of its program and then runs that under it, in
  // the same order as the others. context: of the device that the program was compiled for.
  // sharding: of the words, with tokens = true and the program's vocabulary; `rows` of weight are
  // here, maybe none. The head takes at most `memory_budget` bytes for workspace and exchanges
  // beside the arena; it is the same on all ranks. On a GPU a plan whose workspace fits where the
  // arena holds that of the head without ranks is taken before others. With 0 the planner's default
  // is what is taken else.
  //
  // Throws, on every rank: Unsupported where the program has not exactly one head operation, or
  // anything but that reads its weight and bias or makes their gradients, saying what; where the
  // device does not serve the sharding (sharding.h); InvalidArgument naming what is wrong with the
  // sharding or differs between ranks, or where memory_budget is below every plan. sharding has no
  // replicas, and its word_table is copied.
  HeadOverRanks(const CompiledProgram& program, const Context& context, const Sharding& sharding,
                std::int64_t rows, std::size_t memory_budget = 0);
  ~HeadOverRanks();
  HeadOverRanks(HeadOverRanks&&) noexcept;
  HeadOverRanks& operator=(HeadOverRanks&&) noexcept;

  const LossPlan& plan() const;
  // That runs take beside the program's arena, from the first on: 0 where the workspace does in
  // which the arena holds the head without ranks.
  std::size_t workspace_bytes() const;

 private:
  friend struct CompilerAccess;
  std::unique_ptr<State> state_;
};

}  // namespace logitless

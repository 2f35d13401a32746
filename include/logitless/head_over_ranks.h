// The vocabulary-parallel head of a compiled program. Each rank runs the program on its own tokens,
// and no rank has the full weight of the head or its gradient
// (docs/use/distributed.md#heads-of-programs).
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

// Shards the head of a program. The program is written and compiled for the full vocabulary, the
// same on all ranks. In runs under this, the head's weight [V, D], its bias [V] and their gradients
// point to this rank's rows alone. The program's results for its tokens are those of the full
// vocabulary. Gradients of the rows are complete sums over the tokens of all ranks, which must not
// be added up again. Without ranks the program has those of its own tokens.
class LOGITLESS_API HeadOverRanks {
 public:
  struct State;  // private to the compiler

  // Collective: every rank makes it from its program and then runs that under it, in the same order
  // as the others. The context's device is the one that the program was compiled for. sharding has
  // tokens = true and the program's vocabulary; `rows` of weight are local, maybe none. It has no
  // replicas, and its vocab_ids is copied.
  //
  // The head takes at most `memory_budget` bytes for workspace and exchanges beside the arena, the
  // same number on all ranks; 0 is the planner's default. On a GPU it prefers a plan whose
  // workspace fits into the arena's workspace of the head without ranks.
  //
  // Throws on every rank. Unsupported: the program has not exactly one head operation, or other
  // operations read its weight and bias or make their gradients; or the device does not support the
  // sharding (sharding.h). InvalidArgument: an error in the sharding, a difference between ranks,
  // or memory_budget below every plan.
  HeadOverRanks(const CompiledProgram& program, const Context& context, const Sharding& sharding,
                std::int64_t rows, std::size_t memory_budget = 0);
  ~HeadOverRanks();
  HeadOverRanks(HeadOverRanks&&) noexcept;
  HeadOverRanks& operator=(HeadOverRanks&&) noexcept;

  const LossPlan& plan() const;
  // Returns the bytes that runs take beside the program's arena, from the first on. 0 where the
  // workspace fits into the arena's workspace of the head without ranks.
  std::size_t workspace_bytes() const;

 private:
  friend struct CompilerAccess;
  std::unique_ptr<State> state_;
};

}  // namespace logitless

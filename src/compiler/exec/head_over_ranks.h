// What a HeadOverRanks holds, and how runs of its program's head become calls of this rank's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "compiler/plan/program.h"
#include "head/head_call.h"
#include "head/shard_plan.h"
#include "logitless/head_over_ranks.h"
#include "logitless/workspace.h"

namespace logitless {

struct HeadOverRanks::State {
  std::shared_ptr<const void> owner;  // of the program
  const ir::Program* program = nullptr;
  DeviceKind device = DeviceKind::cpu;  // that it was compiled for
  const ir::HeadRun* head = nullptr;    // its
  Context context;
  Sharding sharding;
  std::int64_t rows = 0;          // of weight here
  std::size_t memory_budget = 0;  // as asked for
  LossPlan plan;
  std::size_t own_bytes = 0;           // of `workspace`; 0: the program's is large enough
  std::optional<Workspace> workspace;  // from the first run on

  // Collective: checks what is given and makes the plan; `plan` is of this rank alone.
  void make_plan(const PlanRequest& request, const PlanOfRank& plan);
  // room: bytes that the program has for its head's workspace.
  void set_room(std::size_t room);
  ShardedHead checked_head();
  void allocate();  // the workspace, where it is not the program's
  // `of_program`: what the arena holds the dense head in.
  const Workspace& workspace_for(const Workspace& of_program);
  // `call` of the program's head, with operands of all words: of this rank's rows.
  void set_rows(HeadCall& call) const;
};

namespace ir {

// The one head of the program, which alone has to do with its weight, its bias and their gradients.
// Throws Unsupported, saying what else has, or that there is none.
const HeadRun& head_alone(const Program& program);
// Throws InvalidArgument where it was made for another program's.
void require_head(const HeadOverRanks::State& ranks, const Program& program);

}  // namespace ir
}  // namespace logitless

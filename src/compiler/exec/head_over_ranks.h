// The state of a HeadOverRanks, and how the program's head becomes a call on this rank's vocabulary
// shard.
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
  DeviceKind device = DeviceKind::cpu;  // that the program was compiled for
  const ir::HeadRun* head = nullptr;    // of the program
  Context context;
  Sharding sharding;
  std::int64_t rows = 0;          // of the local weight shard
  std::size_t memory_budget = 0;  // as requested
  LossPlan plan;
  std::size_t local_bytes = 0;         // of `workspace`; 0: the program's is large enough
  std::optional<Workspace> workspace;  // allocated by the first run

  // Checks the arguments and makes the plan. Collective.
  void make_plan(const LocalPlanner& planner, const PlanRequest& request);
  // `capacity`: workspace bytes that the program has for its head.
  void set_scratch(std::size_t capacity);
  ShardedHead checked_head();
  void allocate();  // allocates the workspace unless the program's is used
  // Returns the workspace for the head. `of_program`: the arena's workspace of the dense head.
  const Workspace& workspace_for(const Workspace& of_program);
  // Replaces the operands of the full vocabulary in `call` by the rows of this rank.
  void set_rows(HeadCall& call) const;
};

namespace ir {

// Returns the program's only head, which alone uses its weight, its bias and their gradients.
// Throws Unsupported if something else uses them or if there is no head.
const HeadRun& head_alone(const Program& program);
// Throws InvalidArgument if `ranks` was made for another program.
void require_head(const HeadOverRanks::State& ranks, const Program& program);

}  // namespace ir
}  // namespace logitless

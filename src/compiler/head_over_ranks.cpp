#include "compiler/exec/head_over_ranks.h"

#include "compiler/compiled.h"
#include "compiler/exec/head.h"

namespace logitless {

HeadOverRanks::HeadOverRanks(const CompiledProgram& program, const Context& context,
                             const Sharding& sharding, std::int64_t rows, std::size_t memory_budget)
    : state_(new State{.owner = std::make_shared<CompiledProgram>(program),
                       .context = context,
                       .sharding = sharding,
                       .rows = rows,
                       .memory_budget = memory_budget,
                       .plan = {},
                       .workspace = {}}) {
  const CompiledProgram::State& s = CompilerAccess::state(program);
  state_->program = &s.program;
  state_->device = s.device.kind;
  ir::plan_over_ranks(*state_, memory_budget);
}

HeadOverRanks::~HeadOverRanks() = default;
HeadOverRanks::HeadOverRanks(HeadOverRanks&&) noexcept = default;
HeadOverRanks& HeadOverRanks::operator=(HeadOverRanks&&) noexcept = default;

const LossPlan& HeadOverRanks::plan() const { return state_->plan; }
std::size_t HeadOverRanks::workspace_bytes() const { return state_->local_bytes; }

}  // namespace logitless

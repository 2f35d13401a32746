#include "compiler/exec/head_over_ranks.h"

#include <algorithm>
#include <vector>

#include "compiler/exec/backend.h"
#include "core/check.h"

namespace logitless {
namespace {

// Returns rows [rows, D] or [rows] of a view [V, D] or [V].
template <typename View>
View rows_of(const View& all, std::int64_t rows) {
  if (!all.defined()) return all;
  return all.rank() == 1 ? View(all.data(), all.dtype(), {rows})
                         : View(all.data(), all.dtype(), {rows, all.size(1)});
}

}  // namespace

ShardedHead HeadOverRanks::State::checked_head() {
  require(context.device().kind == device, "context: expected one of the ",
          device == DeviceKind::cpu ? "CPU" : "GPU", ", which the program was compiled for");
  head = &ir::head_alone(*program);
  ShardedHead mine{.shape = head->plan->shape, .features = head->plan->features};
  mine.device = context.device();
  require(rows >= 0, "rows: expected 0 or more, got ", rows);
  require(sharding.tokens, "sharding: tokens: expected true, as each rank's program has tokens of ",
          "its own");
  require(sharding.replicas == nullptr,
          "sharding: replicas: expected none: the program itself says what its losses divide by");
  require(sharding.weight == WeightSharding::rows, "sharding: weight: expected rows, got columns");
  require(sharding.vocab == mine.shape.vocab, "sharding: vocab: expected the program's ",
          mine.shape.vocab, ", got ", sharding.vocab);
  mine.shape.vocab = rows;
  mine.options = [this](PlanDigest& digest) {
    digest.same("memory_budget", static_cast<std::int64_t>(memory_budget));
  };
  require_sharding(sharding, rows);
  set_sharding(sharding, mine.features);
  return mine;
}

void HeadOverRanks::State::make_plan(const LocalPlanner& planner, const PlanRequest& request) {
  require(sharding.vocab_group != nullptr,
          "sharding: vocab_group: expected the ranks of the vocabulary, got no communicator");
  PlanRequest of_ranks = request;
  of_ranks.sharding = sharding;
  plan = plan_sharded(planner, sharding, of_ranks, [&] { return checked_head(); });
  // Keeps a copy: the caller's table may not outlive this call.
  const std::vector<std::int32_t>& table = plan.agreement->table;
  if (sharding.vocab_ids.defined()) sharding.vocab_ids = {table.data(), DType::i32, {table.size()}};
}

void HeadOverRanks::State::set_scratch(std::size_t capacity) {
  local_bytes = plan.workspace_bytes() > capacity ? plan.workspace_bytes() : 0;
}

const Workspace& HeadOverRanks::State::workspace_for(const Workspace& of_program) {
  allocate();
  return workspace ? *workspace : of_program;
}

void HeadOverRanks::State::allocate() {
  if (local_bytes > 0 && !workspace) workspace.emplace(context, plan);
}

void HeadOverRanks::State::set_rows(HeadCall& call) const {
  call.plan = &plan;
  call.shape.vocab = rows;
  call.in.weight = rows_of(call.in.weight, rows);
  call.in.bias = rows_of(call.in.bias, rows);
  call.gradients.d_weight = rows_of(call.gradients.d_weight, rows);
  call.gradients.d_bias = rows_of(call.gradients.d_bias, rows);
  set_sharding(sharding, call.features);
  set_shard(plan, sharding, call);
}

namespace ir {
namespace {

bool has(const std::vector<int>& buffers, int buffer) {
  return std::find(buffers.begin(), buffers.end(), buffer) != buffers.end();
}

}  // namespace

const HeadRun& head_alone(const Program& program) {
  const auto refuse = [](const auto&... why) { throw Unsupported(concat("the program", why...)); };
  const std::vector<const Instruction*> heads = heads_of(program);
  if (heads.size() > 1) refuse(" has ", heads.size(), " head operations, expected one");
  const auto& head = std::get<HeadRun>(heads[0]->what);
  const auto require_alone = [&](const char* what, const View& view, bool result) {
    if (view.buffer < 0) return;
    const std::vector<int>& given = result ? program.results : program.parameters;
    if (!has(given, view.buffer) || view.offset != 0 || !is_contiguous(view)) {
      refuse("'s head makes or takes ", what, " that is not ", result ? "a result" : "a parameter",
             " as it is");
    }
    // A rank holds a shard of it, but all of the other operands.
    for (const View* other : {&head.x, &head.w, &head.targets, &head.bias}) {
      if (!result && other != &view && other->buffer == view.buffer)
        refuse(" reads ", what, " of its head as another operand of the head, too");
    }
    for (const Instruction& i : program.instructions) {
      if (&i == heads[0]) continue;
      const bool reads = has(reads_of(i), view.buffer);
      if (reads || has(writes_of(i), view.buffer)) {
        refuse(reads ? " reads " : " writes ", what, " of its head elsewhere, too: ",
               i.name.empty() ? "in an instruction without a name" : i.name);
      }
    }
  };
  require_alone("the weight", head.w, false);
  require_alone("the bias", head.bias, false);
  require_alone("the gradient of the weight", head.d_w, true);
  require_alone("the gradient of the bias", head.d_bias, true);
  return head;
}

void require_head(const HeadOverRanks::State& ranks, const Program& program) {
  for (const Instruction& i : program.instructions) {
    if (std::get_if<HeadRun>(&i.what) == ranks.head) return;
  }
  throw InvalidArgument("head: expected a HeadOverRanks that was made of this program");
}

}  // namespace ir
}  // namespace logitless

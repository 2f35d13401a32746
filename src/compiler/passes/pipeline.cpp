#include "compiler/passes/pipeline.h"

#include <algorithm>
#include <chrono>

#include "compiler/passes/eliminate.h"
#include "compiler/passes/join_pads.h"
#include "compiler/passes/lower_heads.h"
#include "compiler/passes/recompute_cheap.h"
#include "compiler/passes/widen_sums.h"
#include "compiler/plan/lower.h"

namespace logitless::ir {
namespace {

// A pass that reads and writes the graph alone.
template <Graph (*kPass)(const Graph&)>
void rewrite(Compilation& c) {
  c.graph = kPass(c.graph);
}

void recompute(Compilation& c) {
  c.written = c.graph;
  c.graph = recompute_cheap(c.graph);
}

void plan_unchunked(Compilation& c) { c.unchunked = c.program = lower(c.graph, c.target, c.added); }

// What the largest workspace of a head takes.
std::int64_t head_bytes(const Program& program) {
  std::int64_t most = 0;
  for (const Instruction& i : program.instructions) {
    if (const auto* head = std::get_if<HeadRun>(&i.what))
      most = std::max(most, program.buffers[static_cast<std::size_t>(head->scratch)].value_bytes);
  }
  return most;
}

bool heads_wanted(const Compilation& c) { return c.chunk && c.head_engine && c.chunks == 0; }
void call_head_engine(Compilation& c) {
  const Graph lowered = lower_heads(c.written, 0);
  if (lowered.size() == c.written.size()) return;
  c.graph = recompute_cheap(lowered);
  // Most of a budget is for the rest.
  if (c.budget > 0 && head_bytes(lower(c.graph, c.target, c.added)) > c.budget / 2)
    c.graph = limit_heads(c.graph, c.budget / 2);
}

bool chunks_wanted(const Compilation& c) { return c.chunk; }
void choose(Compilation& c) {
  ChunkChoice choice = choose_chunks(c.graph, {c.target, c.budget, c.chunks, c.added});
  c.graph = std::move(choice.graph);
  c.program = std::move(choice.program);
  c.regions = std::move(choice.regions);
  c.refusals = std::move(choice.refusals);
}

bool over_budget(const Compilation& c) {
  return c.chunk && c.budget > 0 && c.program.value_bytes > c.budget;
}
void limit(Compilation& c) {
  constexpr std::int64_t kLeastHead = 1 << 16;  // no plan of the head engine takes less
  for (std::int64_t bytes = head_bytes(c.program) / 2; over_budget(c) && bytes > kLeastHead;
       bytes /= 2) {
    c.graph = limit_heads(c.graph, bytes);
    c.program = lower(c.graph, c.target, c.added);
  }
}

constexpr Pass kPipeline[] = {
    {"eliminate-common", rewrite<eliminate_common>},
    {"eliminate-dead", rewrite<eliminate_dead>},
    {"join-pads", rewrite<join_pads>},
    {"widen-sums", rewrite<widen_sums>},
    {"recompute-cheap", recompute},
    {"plan-unchunked", plan_unchunked},
    {"lower-heads", call_head_engine, heads_wanted},
    {"choose-chunks", choose, chunks_wanted},
    {"limit-heads", limit, over_budget, false},  // loops did not do: the heads take less
};

}  // namespace

std::span<const Pass> pipeline() { return kPipeline; }

void run_pipeline(Compilation& c, const std::function<void(const Pass&, double)>& after) {
  using Clock = std::chrono::steady_clock;
  for (const Pass& pass : kPipeline) {
    if (pass.when != nullptr && !pass.when(c)) continue;
    const auto start = Clock::now();
    pass.run(c);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    verify(c.graph);
    if (pass.shown) after(pass, seconds);
  }
}

}  // namespace logitless::ir

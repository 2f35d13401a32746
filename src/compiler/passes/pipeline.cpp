#include "compiler/passes/pipeline.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "compiler/passes/eliminate.h"
#include "compiler/passes/join_pads.h"
#include "compiler/passes/lower_heads.h"
#include "compiler/passes/narrow.h"
#include "compiler/passes/recompute_cheap.h"
#include "compiler/passes/refine_axes.h"
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
// Whether the loops compute nothing twice, and no product as large as `largest` is left beside
// them.
bool is_settled(const ChunkChoice& choice, std::int64_t largest) {
  for (const ChunkedRegion& region : choice.regions) {
    if (region.extra_work > 1e-3) return false;
  }
  return std::none_of(choice.graph.nodes().begin(), choice.graph.nodes().end(), [&](const Node& n) {
    return n.op == Op::dot && elements_of(n.results[0]) >= largest;
  });
}
// Within the budget comes first, then less work, then the lower peak. While none is within it, work
// weighs twice what memory does.
bool is_better(const Program& a, const Program& b, std::int64_t budget) {
  const bool fits_a = budget == 0 || a.value_bytes <= budget,
             fits_b = budget == 0 || b.value_bytes <= budget;
  if (fits_a != fits_b) return fits_a;
  if (fits_a && std::abs(a.multiply_adds - b.multiply_adds) > 1e-3 * b.multiply_adds)
    return a.multiply_adds < b.multiply_adds;
  const auto weighed = [&](const Program& p) {
    const double work = fits_a ? 1.0 : std::max(p.multiply_adds, 1.0);
    return static_cast<double>(p.value_bytes) * work * work;
  };
  return weighed(a) < weighed(b);
}

void choose(Compilation& c) {
  const ChunkRequest request{c.target, c.budget, c.chunks, c.added};
  ChunkChoice choice = choose_chunks(c.graph, request);
  // Rows as sequences, or as pairs of them, may be what a chunk has to hold.
  const Value product = largest_product(c.graph);
  if (product.valid() && !is_settled(choice, elements_of(c.graph.type(product)))) {
    if (const std::optional<Graph> refined = refine_axes(c.graph, product)) {
      ChunkChoice other = choose_chunks(*refined, request);
      if (is_better(other.program, choice.program, c.budget)) choice = std::move(other);
    }
  }
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
    {"narrow", rewrite<narrow_products>},
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

#include "compiler/passes/pipeline.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "compiler/choose_chunks.h"
#include "compiler/passes/narrow_operands.h"
#include "compiler/passes/passes.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/lower.h"

namespace logitless::ir {
namespace {

// Wraps a pass that reads and writes the graph alone.
template <Graph (*kPass)(const Graph&)>
void rewrite(Compilation& c) {
  c.graph = kPass(c.graph);
}

bool strides_wanted(const Compilation& c) { return c.target.strided_gemms(); }

Graph with_split_lse(const Compilation& c, const Graph& graph) {
  return c.externs ? widen_lse(graph) : split_lse(graph);
}
void split(Compilation& c) {
  c.written = c.graph;
  c.graph = with_split_lse(c, c.graph);
}

// Heads are found before: the engine has kernels for operands of fp32.
bool narrow_wanted(const Compilation& c) {
  const Rates rates = c.target.rates();
  return !c.externs && rates.products16 > rates.products32;
}

// Long rows that a kernel holds on the chip are computed in one pass: see Target.
bool rows_wanted(const Compilation& c) { return c.target.most_group_columns() > 0; }

void plan_unchunked(Compilation& c) {
  c.unchunked_graph = c.graph;
  c.unchunked = c.program =
      lower(c.graph, c.target, c.added, InstructionOrder::for_memory, &c.bodies);
}

bool heads_wanted(const Compilation& c) { return c.chunk && c.head_engine && c.chunks == 0; }
void call_head_engine(Compilation& c) {
  const Graph written = drop_settling(c.written);
  const Graph lowered = lower_heads(written, 0);
  if (lowered.size() == written.size()) return;
  c.graph = with_split_lse(c, lowered);
  if (narrow_wanted(c)) c.graph = narrow_operands(c.graph);
  if (rows_wanted(c)) c.graph = rows_first(sink_picks(c.graph));
  c.graph = recompute_cheap(c.graph);
}

bool chunks_wanted(const Compilation& c) { return c.chunk; }
// Returns whether the loops recompute nothing, and no matrix product as large as `largest` is
// outside of them.
bool is_settled(const ChunkChoice& choice, std::int64_t largest) {
  for (const ChunkedRegion& region : choice.regions) {
    if (region.extra_work > 1e-3) return false;
  }
  return std::none_of(choice.graph.nodes().begin(), choice.graph.nodes().end(), [&](const Node& n) {
    return n.op == Op::dot && elements_of(n.results[0]) >= largest;
  });
}
// Returns the bytes that the budget bounds.
std::int64_t bytes_of(const Program& p, const Compilation& c) {
  return c.budget_with_scratch ? p.arena_bytes : p.value_bytes;
}
bool fits(const Program& p, const Compilation& c) {
  return c.budget == 0 || bytes_of(p, c) <= c.budget;
}
// Compares by budget first, then by work. Within a budget the faster program is better, of equally
// fast ones the smaller; without one, the smaller. If neither is within the budget, the work counts
// squared: it weighs twice as much as memory.
bool is_better(const Program& a, const Program& b, const Compilation& c) {
  const bool fits_a = fits(a, c), fits_b = fits(b, c);
  if (fits_a != fits_b) return fits_a;
  if (fits_a && std::abs(a.multiply_adds - b.multiply_adds) > 1e-3 * b.multiply_adds)
    return a.multiply_adds < b.multiply_adds;
  if (fits_a && c.budget > 0) {
    const double seconds_a = predicted_seconds(a, c.target.rates()),
                 seconds_b = predicted_seconds(b, c.target.rates());
    if (seconds_a != seconds_b) return seconds_a < seconds_b;
  }
  const auto weighed = [&](const Program& p) {
    const double work = fits_a ? 1.0 : std::max(p.multiply_adds, 1.0);
    return static_cast<double>(bytes_of(p, c)) * work * work;
  };
  return weighed(a) < weighed(b);
}

void choose(Compilation& c) {
  const ChunkRequest request{c.target, c.budget, c.budget_with_scratch, c.explore, c.chunks,
                             c.added,  &c.bodies};
  ChunkChoice choice = choose_within(c.graph, request);
  // Without the head engine, the weight in another dtype may lie in its gradient's memory.
  if (!fits(choice.program, c) && fits(c.unchunked, c)) {
    c.graph = c.unchunked_graph;
    choice = choose_within(c.graph, request);
  }
  // Refined rows, as sequences or pairs of them, may allow other chunks. They may also be faster
  // with loops that are settled already, which a budget asks for.
  const Value product = largest_product(c.graph);
  if (product.valid() &&
      (c.budget > 0 || !is_settled(choice, elements_of(c.graph.type(product))))) {
    if (const std::optional<Graph> refined = refine_axes(c.graph, product)) {
      ChunkChoice other = choose_within(*refined, request);
      if (is_better(other.program, choice.program, c)) choice = std::move(other);
    }
  }
  c.graph = std::move(choice.graph);
  c.program = std::move(choice.program);
  c.regions = std::move(choice.regions);
  c.refusals = std::move(choice.refusals);
  c.plans = std::move(choice.plans);
  c.search = std::move(choice.search);
  c.recomputed = choice.recomputed;
}

constexpr Pass kPipeline[] = {
    {"lift-transposes", rewrite<lift_transposes>, rows_wanted},
    {"eliminate-common", rewrite<eliminate_common>},
    {"eliminate-dead", rewrite<eliminate_dead>},
    {"near-results", rewrite<mark_near_results>},
    {"narrow", rewrite<narrow_products>},
    {"part-products", rewrite<part_products>, strides_wanted},
    {"spread-masks", rewrite<spread_masks>},
    {"sink-puts", rewrite<sink_puts>},
    {"join-pads", rewrite<join_pads>},
    {"widen-sums", rewrite<widen_sums>},
    {"split-lse", split},
    {"narrow-operands", rewrite<narrow_operands>, narrow_wanted},
    {"sink-picks", rewrite<sink_picks>, rows_wanted},
    {"rows-first", rewrite<rows_first>, rows_wanted},
    {"recompute-cheap", rewrite<recompute_cheap>},
    {"plan-unchunked", plan_unchunked},
    {"lower-heads", call_head_engine, heads_wanted},
    {"choose-chunks", choose, chunks_wanted},
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
    after(pass, seconds);
  }
}

}  // namespace logitless::ir

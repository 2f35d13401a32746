// Values that are recomputed by matrix products: which, at what cost, and with equal bits.
#include <gtest/gtest.h>

#include <algorithm>

#include "compiler/choose_chunks.h"
#include "compiler/compiled.h"
#include "compiler/ir/text.h"
#include "compiler/passes/recompute_segments.h"
#include "compiler/plan/lower.h"
#include "compiler/programs.h"
#include "compiler/recompute_points.h"
#include "compiler/recompute_within.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"

namespace logitless::test {
namespace {

// Two layers of 1 KiB each, and a backward that reads them again.
const char* const kTwoLayers =
    "graph g(%x: f32[16, 4], %u: f32[4, 16], %v: f32[16, 16], %w: f32[16, 16]) {"
    "%a = dot %x, %u contract(1; 0) %ta = tanh %a %b = dot %ta, %v contract(1; 0) %tb = tanh %b "
    "%c = dot %tb, %w contract(1; 0) %tc = tanh %c %dc = mul %tc, %c "
    "%d = dot %dc, %w contract(1; 1) %db = mul %d, %b %e = dot %db, %v contract(1; 1) "
    "%da = mul %e, %a %g = dot %x, %da contract(0; 0) return g: %g }";

TEST(RecomputeSegments, TheFirstLayerIsGivenUpFirst) {
  const ir::Graph graph = ir::parse(kTwoLayers).graph;
  const ir::RecomputeCurve curve(graph, 0.0);
  const std::vector<ir::RecomputeCurve::Point> points = points_of(curve);
  ASSERT_GE(points.size(), 3u);
  EXPECT_EQ(points[0].multiply_adds, 0.0);
  // The first layer's product is the cheapest: 16 * 16 * 4.
  EXPECT_EQ(points[1].multiply_adds, 16 * 16 * 4);
  EXPECT_EQ(points[0].kept - points[1].kept, 16 * 16 * 4);
  EXPECT_EQ(
      ir::print(curve.graph_of(points[1])),
      ir::print(
          ir::parse(
              "graph g(%x: f32[16, 4], %u: f32[4, 16], %v: f32[16, 16], %w: f32[16, 16]) {"
              "%a = dot %x, %u contract(1; 0) %ta = tanh %a %b = dot %ta, %v contract(1; 0) "
              "%tb = tanh %b %c = dot %tb, %w contract(1; 0) %tc = tanh %c %dc = mul %tc, %c "
              "%d = dot %dc, %w contract(1; 1) %db = mul %d, %b %e = dot %db, %v contract(1; 1) "
              "%a_1 = dot %x, %u contract(1; 0) %da = mul %e, %a_1 "
              "%g = dot %x, %da contract(0; 0) return g: %g }")
              .graph));
}

CompiledProgram unchunked(const NamedProgram& p) {
  CompileOptions options;
  options.sizes = p.sizes;
  options.chunk = false;
  options.threads = 1;
  return compile(p.make(DType::f32), options);
}

TEST(RecomputeSegments, CountsMultiplyAddsAsLoweringDoes) {
  for (const NamedProgram& p : programs()) {
    for (const bool chunk : {false, true}) {
      SCOPED_TRACE(p.name + (chunk ? " chunked" : ""));
      CompileOptions options;
      options.sizes = p.sizes;
      options.chunk = chunk;
      options.chunks = 4;
      options.head_engine = false;
      const CompiledProgram program = compile(p.make(DType::f32), options);
      const CompiledProgram::State& state = CompilerAccess::state(program);
      double sum = 0.0;
      for (int id = 0; id < state.graph.size(); ++id) sum += ir::multiply_adds_of(state.graph, id);
      EXPECT_EQ(sum, state.program.multiply_adds);
    }
  }
}

TEST(RecomputeSegments, LessIsKeptForMoreWork) {
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    const CompiledProgram program = unchunked(p);
    const std::vector<ir::RecomputeCurve::Point> points =
        points_of(ir::RecomputeCurve(CompilerAccess::state(program).graph, 1.0));
    for (std::size_t i = 1; i < points.size(); ++i) {
      EXPECT_LT(points[i].weight, points[i - 1].weight);
      EXPECT_GT(points[i].cost, points[i - 1].cost);
      for (std::size_t id = 0; id < points[i].again.size(); ++id)
        EXPECT_LE(points[i - 1].again[id], points[i].again[id]) << id;
    }
  }
}

TEST(RecomputeSegments, KeepsTheBitsOfAllPrograms) {
  int count = 0;
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    const CompiledProgram program = unchunked(p);
    count += expect_same_bits(program, random_inputs(CompilerAccess::state(program).graph, 3)) - 1;
  }
  EXPECT_GT(count, 10);
}

// Values are recomputed in a plan without a budget. The messages about its loops must not ask for
// the budget that is given.
TEST(RecomputeWithin, ABudgetThatIsNamedIsNotAskedFor) {
  const ir::CpuTarget target(1);
  std::int64_t asked = 0;
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    const ir::Graph graph = CompilerAccess::state(unchunked(p)).graph;
    for (const std::int64_t budget : {0, 1}) {
      const ir::ChunkSearch found(graph, {.target = target, .budget = budget, .explore = true});
      for (const std::string& why : found.free_choice().refusals) {
        if (why.find("name a budget") == std::string::npos) continue;
        ++asked;
        EXPECT_EQ(budget, 0) << why;
      }
    }
  }
  EXPECT_GT(asked, 0);
}

TEST(RecomputeWithin, MeetsABudgetWithTheLeastWork) {
  const ir::Graph graph = ir::parse(kTwoLayers).graph;
  const ir::CpuTarget target(1);
  const ir::Program program = ir::lower(graph, target);
  const auto within = [&](std::int64_t budget) {
    return ir::recompute_within(graph, program, {.target = target, .budget = budget});
  };
  EXPECT_EQ(program.value_bytes, 4 * 1024);
  const std::optional<ir::RecomputeChoice> one = within(3 * 1024);
  ASSERT_TRUE(one);
  EXPECT_LE(one->program.value_bytes, 3 * 1024);
  EXPECT_EQ(one->values, 1);
  EXPECT_EQ(one->multiply_adds, 16 * 16 * 4);
  const std::optional<ir::RecomputeChoice> all =
      ir::least_recomputed(graph, program, {.target = target});
  ASSERT_TRUE(all);
  EXPECT_LE(all->program.value_bytes, one->program.value_bytes);
}

// Equal layers with residuals, and a loss over the vocabulary.
Graph layers(int count) {
  Graph g("layers");
  const std::int64_t rows = 8192, dim = 64, hidden = 256, vocab = 8192;
  Value x = g.parameter("x", DType::f32, {rows, dim});
  std::vector<Value> weights;
  const auto weight = [&](const std::string& name, Shape shape) {
    return weights.emplace_back(g.parameter(name, DType::f32, std::move(shape)));
  };
  for (int i = 0; i < count; ++i) {
    const std::string at = std::to_string(i);
    const Value up = tanh(matmul(x, weight("up" + at, {dim, hidden})));
    x = x + matmul(up, weight("down" + at, {hidden, dim}));
  }
  const Value logits = dot(x, weight("words", {vocab, dim}), {{1}, {1}}),
              targets = g.parameter("targets", DType::i32, {rows});
  const Value loss = mean(logsumexp(logits, {1}) - pick(logits, targets, 1), {0});
  g.result("loss", loss);
  const std::vector<Value> grads = g.gradients({loss}, weights);
  for (std::size_t i = 0; i < grads.size(); ++i) g.result("d" + std::to_string(i), grads[i]);
  return g;
}

// Returns whether a has at most the bytes and seconds of b, and less of one of them.
bool beats(const PlanPoint& a, const PlanPoint& b) {
  return a.value_bytes <= b.value_bytes && a.seconds <= b.seconds &&
         (a.value_bytes < b.value_bytes || a.seconds < b.seconds);
}

// A budget is met by less workspace for the head, by recomputed values, or by both. The cheapest is
// chosen, down to the last value of a layer, which takes 8 MiB.
TEST(RecomputeWithin, NoBudgetGetsAPlanThatAnotherOneBeats) {
  const Graph graph = layers(4);
  CompileOptions options;
  options.threads = 1;
  std::vector<PlanPoint> all;
  int recomputed = 0;
  for (std::size_t budget = 60; budget >= 28; budget -= 8) {
    SCOPED_TRACE(budget);
    options.memory_budget = budget << 20;
    const CompiledProgram program = compile(graph, options);
    const auto got = std::find_if(program.plans().begin(), program.plans().end(),
                                  [](const PlanPoint& p) { return p.chosen; });
    ASSERT_NE(got, program.plans().end());
    const CompiledProgram::State& state = CompilerAccess::state(program);
    EXPECT_EQ(got->value_bytes, static_cast<std::size_t>(state.program.value_bytes));
    EXPECT_LE(got->value_bytes, options.memory_budget);
    EXPECT_GT(got->value_bytes, options.memory_budget - (8 << 20)) << program.explain();
    recomputed += state.recomputed.values > 0;
    for (const PlanPoint& other : all)
      EXPECT_FALSE(beats(*got, other) || beats(other, *got)) << got->what << "; " << other.what;
    all.push_back(*got);
  }
  EXPECT_GE(recomputed, 4);
}

TEST(RecomputeWithin, AReportShowsWhatBudgetsWouldTake) {
  CompileOptions options;
  options.threads = 1;
  options.explore = true;
  const CompiledProgram program = compile(layers(4), options);
  const auto again = [](const PlanPoint& p) {
    return p.what.find("computed again") != std::string::npos;
  };
  EXPECT_GE(std::count_if(program.plans().begin(), program.plans().end(), again), 1)
      << program.explain();
  EXPECT_EQ(CompilerAccess::state(program).recomputed.values, 0);
}

}  // namespace
}  // namespace logitless::test

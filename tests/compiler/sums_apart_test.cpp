// Separates the sum of a 16-bit gradient from a region that would need it in fp32, or divides it.
#include <gtest/gtest.h>

#include <algorithm>

#include "compiler/ir/text.h"
#include "compiler/passes/form_loops.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

// Returns the entropy of rows, without a part of its gradient by the logits, with gradients of this
// dtype.
std::string entropy(const std::string& shapes, const std::string& dtype) {
  return "graph g(" + shapes +
         ") {\n"
         "  %z = dot %h, %w contract(1; 1) : f32[N, V]\n"
         "  %n = reduce_lse %z dims(1)\n"
         "  %b = broadcast %n dims(0) : f32[N, V]\n"
         "  %l = sub %z, %b\n"
         "  %p = exp %l\n"
         "  %u = mul %p, %l\n"
         "  %s = reduce_sum %u dims(1)\n"
         "  %t = broadcast %s dims(0) : f32[N, V]\n"
         "  %d = sub %l, %t\n"
         "  %e = mul %p, %d\n"
         "  %g = cast %e : bf16[N, V]\n"
         "  %dh = dot %g, %w contract(1; 0) : bf16[N, D]\n"
         "  %dw = dot %g, %h contract(0; 0) : " +
         dtype +
         "[V, D]\n"
         "  return s: %s, dh: %dh, dw: %dw\n}\n";
}
// Returns a loss whose gradient by the logits waits for all rows, or needs the sums of a whole row
// up to each logit: `offset` is what its logarithms are compared with.
std::string compared(const std::string& offset) {
  return "graph g(%h: bf16[N, D], %w: bf16[V, D]) {\n"
         "  %z = dot %h, %w contract(1; 1) : f32[N, V]\n"
         "  %n = reduce_lse %z dims(1)\n"
         "  %b = broadcast %n dims(0) : f32[N, V]\n"
         "  %l = sub %z, %b\n"
         "  %p = exp %l\n" +
         offset +
         "  %d = sub %l, %t\n"
         "  %e = mul %p, %d\n"
         "  %g = cast %e : bf16[N, V]\n"
         "  %dh = dot %g, %w contract(1; 0) : bf16[N, D]\n"
         "  %dw = dot %g, %h contract(0; 0) : bf16[V, D]\n"
         "  return dh: %dh, dw: %dw\n}\n";
}
const std::string kOfAllRows =
    "  %u = mul %p, %l\n"
    "  %s = reduce_sum %u dims(0, 1)\n"
    "  %t = broadcast %s dims() : f32[N, V]\n";
const std::string kOfWholeRows = "  %t = cumsum %p axis(1) reverse(1)\n";
const std::string kShapes = "%h: bf16[N, D], %w: bf16[V, D]";

ir::Graph bound(const std::string& text, const Bindings& sizes) {
  return ir::bind(ir::parse(text).graph, sizes);
}
ir::Region region_of(const ir::Graph& graph, const std::string& name, int dim) {
  for (int id = 0; id < graph.size(); ++id) {
    if (graph.node(id).name == name) return ir::grow_region(graph, {id, 0}, {dim, 1, 1});
  }
  return {};
}

TEST(SumsApart, CopiesReadTheRowsOfTheFirst) {
  const ir::Graph graph = bound(entropy(kShapes, "bf16"), {{"N", 12}, {"V", 40}, {"D", 6}});
  const ir::Region rows = region_of(graph, "z", 0);
  ASSERT_EQ(rows.phases, 1);
  const std::int64_t sums = 4 * 40 * 6;
  EXPECT_FALSE(ir::sums_apart(graph, rows, sums + 1));
  const std::optional<ir::SumsApart> apart = ir::sums_apart(graph, rows, sums);
  ASSERT_TRUE(apart);
  EXPECT_EQ(apart->bytes, sums);
  ir::verify(apart->graph);
  int products = 0;
  for (const ir::Node& n : apart->graph.nodes()) products += n.op == ir::Op::dot;
  EXPECT_EQ(products, 4);
  const std::vector<ir::LoopCut> cuts = {{apart->region, 5}, {apart->copies, 7, "other"}};
  const std::optional<ir::Graph> loops = ir::form_loops(apart->graph, cuts, "first");
  ASSERT_TRUE(loops);
  ir::verify(*loops);
  // Each group has one loop, and none sums over chunks.
  std::vector<std::string> groups;
  for (const ir::Node& n : loops->nodes()) {
    if (n.op != ir::Op::loop) continue;
    groups.push_back(ir::group_of(n.attributes->loop->symbol));
    for (const auto& output : n.attributes->loop->outputs)
      EXPECT_EQ(output.kind, ir::Loop::Out::stack);
  }
  EXPECT_EQ(groups, (std::vector<std::string>{"first", "other"}));
  const ir::Tensors inputs = random_inputs(graph, 1), expected = ir::interpret(graph, inputs);
  EXPECT_EQ(difference(ir::interpret(apart->graph, inputs), expected), 0.0);
  EXPECT_LT(difference(ir::interpret(*loops, inputs), expected), 1e-2);  // sums round in chunks
}

TEST(SumsApart, NothingWhereItSavesNothing) {
  const Bindings sizes = {{"N", 12}, {"V", 40}, {"D", 6}};
  // fp32 sums are the result itself.
  const ir::Graph wide = bound(entropy(kShapes, "f32"), sizes);
  EXPECT_FALSE(ir::sums_apart(wide, region_of(wide, "z", 0), 1));
}

// Along the vocabulary there are several loops, the last of which sums the hidden states' gradient.
TEST(SumsApart, TheLastLoopMayHaveTheSum) {
  const ir::Graph graph = bound(entropy(kShapes, "bf16"), {{"N", 12}, {"V", 40}, {"D", 6}});
  const ir::Region columns = region_of(graph, "z", 1);
  ASSERT_GT(columns.phases, 1);
  const std::optional<ir::SumsApart> apart = ir::sums_apart(graph, columns, 1);
  ASSERT_TRUE(apart);
  EXPECT_EQ(apart->region.phases, columns.phases);
  const std::vector<ir::LoopCut> cuts = {{apart->region, 7}, {apart->copies, 5, "other"}};
  const std::optional<ir::Graph> loops = ir::form_loops(apart->graph, cuts, "first");
  ASSERT_TRUE(loops);
  const ir::Tensors inputs = random_inputs(graph, 1), expected = ir::interpret(graph, inputs);
  EXPECT_LT(difference(ir::interpret(*loops, inputs), expected), 1e-2);  // sums round in chunks
}

// Compiles and runs a program with sums of 2 MiB within a part of them, and returns its chosen
// plan.
PlanPoint checked_within(const std::string& text, std::int64_t share) {
  const std::int64_t n = 256, v = 2048, d = 256;
  const Graph graph = Graph::parse(text);
  CompileOptions options;
  options.sizes = {{"N", n}, {"V", v}, {"D", d}};
  options.head_engine = false;
  options.threads = 1;
  const CompiledProgram whole = compile(graph, options);
  options.memory_budget = static_cast<std::size_t>(v * d * 4 / share);
  const CompiledProgram program = compile(graph, options);
  const auto& plans = program.plans();
  const auto chosen =
      std::find_if(plans.begin(), plans.end(), [](const PlanPoint& p) { return p.chosen; });
  EXPECT_LE(chosen->value_bytes, options.memory_budget) << program.explain();
  const ir::Tensors inputs = random_inputs(bound(text, options.sizes), 2);
  EXPECT_LT(difference(execute(program, inputs), execute(whole, inputs)), 1e-2);
  return *chosen;
}

TEST(SumsApart, ABudgetBelowTheSumsCostsOneProduct) {
  EXPECT_NEAR(checked_within(entropy(kShapes, "bf16"), 4).extra_work, 1.0 / 3, 1e-9);
}

// The loop that waits for all rows computes the logits again, and so does the one of the sums.
TEST(SumsApart, ABudgetBelowTheSumsOfALaterLoopCostsOneMoreProduct) {
  EXPECT_NEAR(checked_within(compared(kOfAllRows), 4).extra_work, 2.0 / 3, 1e-9);
}

TEST(SumsInParts, EachPartHasALoopThatComputesWholeRowsAgain) {
  const ir::Graph graph = bound(compared(kOfWholeRows), {{"N", 12}, {"V", 40}, {"D", 6}});
  const ir::Region rows = region_of(graph, "z", 0);
  const std::int64_t sums = 4 * 40 * 6;
  EXPECT_FALSE(ir::sums_apart(graph, rows, sums));
  EXPECT_FALSE(ir::sums_in_parts(graph, rows, 2, sums + 1));
  EXPECT_FALSE(ir::sums_in_parts(graph, rows, 4, sums));  // 6 columns
  const std::optional<ir::SumsInParts> parts = ir::sums_in_parts(graph, rows, 3, sums);
  ASSERT_TRUE(parts);
  EXPECT_EQ(parts->bytes, sums / 3);
  EXPECT_EQ(parts->region.phases, rows.phases + 2);
  ir::verify(parts->graph);
  const ir::LoopCut cut{parts->region, 5};
  const std::optional<ir::Graph> loops = ir::form_loops(parts->graph, {&cut, 1}, "c");
  ASSERT_TRUE(loops);
  ir::verify(*loops);
  const auto count = [&](ir::Op op) {
    return std::count_if(loops->nodes().begin(), loops->nodes().end(),
                         [&](const ir::Node& n) { return n.op == op; });
  };
  EXPECT_EQ(count(ir::Op::loop), 3);
  EXPECT_EQ(count(ir::Op::dot), 0);
  const ir::Tensors inputs = random_inputs(graph, 1), expected = ir::interpret(graph, inputs);
  EXPECT_EQ(difference(ir::interpret(parts->graph, inputs), expected), 0.0);
  EXPECT_LT(difference(ir::interpret(*loops, inputs), expected), 1e-2);  // sums round in chunks
}

TEST(SumsInParts, ABudgetOfHalfTheSumsIsMet) {
  EXPECT_GT(checked_within(compared(kOfWholeRows), 2).extra_work, 0.3);
}

}  // namespace
}  // namespace logitless::test

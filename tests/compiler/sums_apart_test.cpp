// Separates the sum of a 16-bit gradient from a region that would need it in fp32.
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
  // fp32 sums are the result itself; along the vocabulary there are several phases.
  const ir::Graph wide = bound(entropy(kShapes, "f32"), sizes);
  EXPECT_FALSE(ir::sums_apart(wide, region_of(wide, "z", 0), 1));
  const ir::Graph graph = bound(entropy(kShapes, "bf16"), sizes);
  EXPECT_FALSE(ir::sums_apart(graph, region_of(graph, "z", 1), 1));
}

TEST(SumsApart, ABudgetBelowTheSumsCostsOneProduct) {
  const std::int64_t n = 256, v = 2048, d = 256;
  const Graph graph = Graph::parse(entropy(kShapes, "bf16"));
  CompileOptions options;
  options.sizes = {{"N", n}, {"V", v}, {"D", d}};
  options.head_engine = false;
  options.threads = 1;
  const CompiledProgram whole = compile(graph, options);
  options.memory_budget = v * d * 4 / 4;
  const CompiledProgram program = compile(graph, options);
  const auto& plans = program.plans();
  const auto chosen =
      std::find_if(plans.begin(), plans.end(), [](const PlanPoint& p) { return p.chosen; });
  EXPECT_LE(chosen->value_bytes, options.memory_budget) << program.explain();
  EXPECT_NEAR(chosen->extra_work, 1.0 / 3, 1e-9) << program.explain();
  const ir::Tensors inputs = random_inputs(bound(entropy(kShapes, "bf16"), options.sizes), 2);
  EXPECT_LT(difference(execute(program, inputs), execute(whole, inputs)), 1e-2);
}

}  // namespace
}  // namespace logitless::test

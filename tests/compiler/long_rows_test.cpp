// The passes that make loops over long rows of a GPU's programs: products after the loop, picks of
// operands, rows before columns, and the rows that a mask leaves out of a head.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <algorithm>

#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/passes/form_loops.h"
#include "compiler/passes/passes.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

ir::Graph bound(const std::string& text, const Bindings& sizes) {
  return ir::bind(ir::parse(text).graph, sizes);
}
int count(const ir::Graph& graph, ir::Op op) {
  return static_cast<int>(std::count_if(graph.nodes().begin(), graph.nodes().end(),
                                        [&](const ir::Node& n) { return n.op == op; }));
}
ir::Region rows_of(const ir::Graph& graph, const std::string& name) {
  for (int id = 0; id < graph.size(); ++id) {
    if (graph.node(id).name == name) return ir::grow_region(graph, {id, 0}, {0, 1, 1});
  }
  return {};
}

// The gradient of the logits in a dtype, and both products of it.
std::string head(const std::string& dtype) {
  return "graph g(%h: " + dtype + "[N, D], %w: " + dtype +
         "[V, D]) {\n"
         "  %z = dot %h, %w contract(1; 1) : f32[N, V]\n"
         "  %n = reduce_lse %z dims(1)\n"
         "  %b = broadcast %n dims(0) : f32[N, V]\n"
         "  %l = sub %z, %b\n"
         "  %p = exp %l\n"
         "  %u = mul %p, %l\n"
         "  %s = reduce_sum %u dims(1)\n"
         "  %g = cast %u : " +
         dtype +
         "[N, V]\n"
         "  %dh = dot %g, %w contract(1; 0)\n"
         "  %dw = dot %g, %h contract(0; 0)\n"
         "  %e = mul %dh, %dh\n"
         "  return s: %s, dh: %e, dw: %dw\n}\n";
}

TEST(ProductsAfter, TheLoopStoresWhatTheyContract) {
  // D is more than half of N, so that the gradient of the weight is big, too.
  const ir::Graph graph = bound(head("bf16"), {{"N", 12}, {"V", 40}, {"D", 8}});
  const ir::Region rows = rows_of(graph, "z");
  ASSERT_EQ(rows.phases, 1);
  const std::optional<ir::Region> rest = ir::products_after(graph, rows);
  ASSERT_TRUE(rest);
  for (const auto& [node, how] : rest->nodes) EXPECT_NE(graph.node(node).name.substr(0, 1), "d");
  const ir::Graph loops = ir::form_loops(graph, *rest, 5);
  EXPECT_EQ(count(loops, ir::Op::loop), 1);
  EXPECT_EQ(count(loops, ir::Op::dot), 2) << ir::print(loops);
  const ir::Tensors inputs = random_inputs(graph, 3);
  EXPECT_LT(difference(ir::interpret(loops, inputs), ir::interpret(graph, inputs)), 1e-12);
}

TEST(ProductsAfter, WideValuesStayInTheLoop) {
  const ir::Graph graph = bound(head("f32"), {{"N", 12}, {"V", 40}, {"D", 8}});
  EXPECT_FALSE(ir::products_after(graph, rows_of(graph, "z")));
}

TEST(SinkPicks, ReadOperandsAndNothingOutOfRange) {
  const std::string text =
      "graph g(%x: f32[6, 90], %r: f32[6], %t: i64[6]) {\n"
      "  %b = broadcast %r dims(0) : f32[6, 90]\n"
      "  %c = constant value(0.5) : f32[6, 90]\n"
      "  %i = iota axis(1) : i64[6, 90]\n"
      "  %j = cast %i : f32[6, 90]\n"
      "  %s = sub %x, %b\n"
      "  %m = mul %s, %c\n"
      "  %y = add %m, %j\n"
      "  %p = pick %y, %t axis(1)\n"
      "  return p: %p\n}\n";
  const ir::Graph graph = ir::parse(text).graph;
  const ir::Graph sunk = ir::sink_picks(graph);
  for (const ir::Node& n : sunk.nodes()) {
    if (n.op != ir::Op::pick) continue;
    EXPECT_EQ(sunk.node(n.operands[0]).op, ir::Op::parameter);
  }
  ir::Tensors inputs = random_inputs(graph, 5);
  inputs.at("t").data = {0.0, 89.0, 90.0, -1.0, 1e15, 7.0};
  EXPECT_EQ(difference(ir::interpret(sunk, inputs), ir::interpret(graph, inputs)), 0.0);
}

TEST(SinkPicks, ColumnsAndSmallValuesStay) {
  const char* const of_columns =
      "graph g(%x: f32[6, 90], %c: f32[90], %t: i64[6]) {\n"
      "  %b = broadcast %c dims(1) : f32[6, 90]\n"
      "  %y = add %x, %b\n  %p = pick %y, %t axis(1)\n  return p: %p\n}\n";
  const char* const small =
      "graph g(%x: f32[6, 9], %t: i64[6]) {\n"
      "  %y = exp %x\n  %p = pick %y, %t axis(1)\n  return p: %p\n}\n";
  for (const char* text : {of_columns, small}) {
    const ir::Graph graph = ir::parse(text).graph;
    EXPECT_EQ(ir::print(ir::sink_picks(graph)), ir::print(graph));
  }
}

TEST(RowsFirst, WholeReductionsAreOfRows) {
  const ir::Graph graph = ir::parse(
                              "graph g(%x: bf16[4, 256, 1024]) {\n"
                              "  %s = reduce_sum %x dims(0, 1, 2)\n"
                              "  %m = reduce_max %x dims(1, 2)\n"
                              "  %r = reduce_sum %x dims(2)\n"
                              "  return s: %s, m: %m, r: %r\n}\n")
                              .graph;
  const ir::Graph rows = ir::rows_first(graph);
  for (const ir::Node& n : rows.nodes()) {
    if (n.op != ir::Op::reduce || rows.node(n.operands[0]).op != ir::Op::parameter) continue;
    EXPECT_EQ(n.attributes->dims, (std::vector<int>{2}));
  }
  const ir::Tensors inputs = random_inputs(graph, 5);
  EXPECT_LT(difference(ir::interpret(rows, inputs), ir::interpret(graph, inputs)), 1e-12);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_EQ(rows.type(rows.outputs()[i].value), graph.type(graph.outputs()[i].value));
}

// A cross entropy whose rows count where a condition holds, with its gradients as PyTorch writes
// them: the ignored target is replaced by 0, and results are selected.
std::string masked(const std::string& condition, const std::string& used) {
  return "graph g(%h: f32[70, 24], %w: f32[90, 24], %t: i64[70], %m: i8[70]) {\n"
         "  %none = constant value(-100) : i64[70]\n"
         "  %zero = constant value(0) : i64[70]\n"
         "  %f = constant value(0) : f32[70]\n" +
         condition +
         "  %u = select %k, %t, %zero\n"
         "  %z = dot %h, %w contract(1; 1)\n"
         "  %l = reduce_lse %z dims(1)\n"
         "  %p = pick %z, %u axis(1)\n"
         "  %d = sub %l, %p\n"
         "  %q = log %d\n"
         "  %e = " +
         used +
         "\n"
         "  %s = reduce_sum %e dims(0)\n"
         "  return s: %s differentiate s wrt %h, %w\n}\n";
}

TEST(IgnoredRows, OfAMaskAndOfATarget) {
  const std::string of_mask = "  %k = ne %m, %i8 \n", eq = "  %k = ne %t, %none\n";
  const std::string weight = "  %c = cast %m : f32[70]\n";
  const std::string i8 = "  %i8 = constant value(0) : i8[70]\n";
  const struct {
    std::string text;
    bool ignored;
  } cases[] = {
      {masked(eq, "select %k, %d, %f"), true},
      {masked(i8 + of_mask, "select %k, %d, %f"), true},
      {masked("  %k = eq %t, %none\n  %k2 = logical_not %k\n", "select %k2, %d, %f"), true},
      {masked(eq, "add %d, %f"), false},                  // every row counts
      {masked(i8 + of_mask, "select %m, %f, %d"), true},  // the rows that the mask leaves out
      {masked(weight + eq, "mul %d, %c"), true},
      {masked(weight + eq, "mul %c, %d"), true},
      // 0 * log(0) where the row is skipped.
      {masked(weight + eq, "mul %q, %c"), true},
      {masked(weight + eq, "mul %d, %d"), false},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.text);
    const ir::Graph graph = GraphAccess::of(Graph::parse(c.text));
    const ir::Graph lowered = ir::lower_heads(graph, 0, /*least_logits=*/1);
    ASSERT_GE(count(lowered, ir::Op::head), 1) << ir::print(lowered);
    for (const ir::Node& n : lowered.nodes()) {
      if (n.op != ir::Op::head) continue;
      EXPECT_EQ(n.attributes->head.ignored.has_value(), c.ignored);
    }
    ir::Tensors inputs = random_inputs(graph, 3);
    for (std::size_t i = 0; i < 70; ++i) {
      inputs.at("t").data[i] = i % 3 == 0 ? -100.0 : static_cast<double>(i % 90);
      inputs.at("m").data[i] = i % 4 == 0;
    }
    EXPECT_LT(difference(ir::interpret(lowered, inputs), ir::interpret(graph, inputs)), 1e-12);
  }
}

}  // namespace
}  // namespace logitless::test

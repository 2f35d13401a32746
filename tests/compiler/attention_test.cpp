// Attention with masks, biases and softcaps: run and refused, in loops and in memory. Derivatives
// are in gradient_test.cpp, cuts in plan_test.cpp, arithmetic in the kernels' level_test.cpp.
#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/lower.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"
#include "compiler/target/cuda.h"

namespace logitless::test {
namespace {

// Two query heads for each key head, all options of scores, and all gradients.
std::string everything(const std::string& t) {
  return "graph g(%q: " + t + "[2, 4, 9, 8], %k: " + t + "[2, 2, 13, 8], %v: " + t +
         "[2, 2, 13, 8], %g: " + t + "[2, 4, 9, 8], %b: " + t +
         "[1, 4, 1, 13], %s: i64[2, 9], %u: i64[2, 13]) { %o, %l = attention %q, %k, %v, %b, %s, "
         "%u causal(1) scale(0.5) softcap(1.5) window(8) bias(1) segments(1) return o: %o "
         "differentiate o by %g wrt %q, %k, %v }";
}

TEST(AttentionScores, RunAsTheInterpreterSays) {
  for (const auto& [dtype, tolerance] : {std::pair{"f32", 2e-5}, {"bf16", 0.05}, {"f16", 0.02}}) {
    SCOPED_TRACE(dtype);
    const Graph graph = Graph::parse(everything(dtype));
    const ir::Graph& plain = GraphAccess::of(graph);
    const ir::Tensors inputs = random_inputs(plain, 3);
    const ir::Tensors expected = ir::interpret(plain, inputs);
    for (const std::int64_t chunks : {0, 2}) {
      CompileOptions options;
      options.threads = 2;
      options.chunks = chunks;
      const CompiledProgram program = compile(graph, options);
      EXPECT_LT(difference(execute(program, inputs), expected), tolerance) << program.text();
    }
  }
}

// A mask that a broadcast repeats is read in place.
TEST(AttentionScores, ReadABiasInItsPlace) {
  const ir::Program program = ir::lower(
      ir::parse("graph g(%q: f32[2, 4, 9, 8], %k: f32[2, 2, 13, 8], %b: f32[9, 13]) { %m = "
                "broadcast %b dims(2, 3) : f32[2, 4, 9, 13] %o, %l = attention %q, %k, %k, %m "
                "causal(0) scale(1) bias(1) return o: %o }")
          .graph,
      ir::CpuTarget(1));
  ASSERT_EQ(program.instructions.size(), 1u);
  EXPECT_EQ(ir::describe(program.instructions[0]), "bias attention 2 x 4 x 9 x 8, 2 x 13 keys f32");
}

TEST(AttentionScores, CountTheKeysOfAWindow) {
  const auto flops = [](const std::string& scores) {
    return ir::flops_of(
        ir::lower(ir::parse("graph g(%q: f32[1, 1, 100, 8]) { %o, %l = attention %q, %q, %q " +
                            scores + " return o: %o }")
                      .graph,
                  ir::CpuTarget(1))
            .instructions[0]);
  };
  EXPECT_EQ(flops("causal(0) scale(1)"), 4.0 * 100 * 8 * 100);
  EXPECT_EQ(flops("causal(1) scale(1)"), 4.0 * 100 * 8 * 50);
  EXPECT_EQ(flops("causal(1) scale(1) window(10)"), 4.0 * 100 * 8 * 10);
  EXPECT_EQ(flops("causal(0) scale(1) window(10)"), 4.0 * 100 * 8 * 20);
}

TEST(AttentionScores, AreRefusedOnAGpu) {
  const auto refusal = [](const std::string& scores) -> std::string {
    try {
      ir::lower(ir::parse("graph g(%q: bf16[1, 1, 64, 64]) { %o, %l = attention %q, %q, %q " +
                          scores + " return o: %o }")
                    .graph,
                ir::CudaTarget(90));
    } catch (const Unsupported& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal("causal(1) scale(1) softcap(20) window(10)"),
            "attention: no kernel of a GPU takes causal softcap window scores; expected all of "
            "them, or causal ones");
}

TEST(AttentionScores, AreBuiltFromOptions) {
  Graph g;
  const Value q = g.parameter("q", DType::f32, {2, 4, 9, 8}),
              k = g.parameter("k", DType::f32, {2, 2, 13, 8}),
              s = g.parameter("s", DType::i32, {2, 9}), u = g.parameter("u", DType::i32, {2, 13});
  AttentionOptions options;
  options.scale = 0.5;
  options.softcap = 30.0;
  options.window = 4;
  options.bias = g.parameter("b", DType::f32, {1, 4, 1, 13});
  options.query_segments = s;
  options.key_segments = u;
  g.result("o", attention(q, k, k, options));
  EXPECT_NE(g.text().find("attention %q, %k, %k, %b, %s, %u causal(0) scale(0.5) softcap(30) "
                          "window(4) bias(1) segments(1)"),
            std::string::npos)
      << g.text();
  options.key_segments = {};
  EXPECT_THROW((void)attention(q, k, k, options), InvalidArgument);
}

// Attentions that differ in one attribute are not merged.
TEST(AttentionScores, TellAttentionsApart) {
  const CompiledProgram program = compile(Graph::parse(
      "graph g(%q: f32[1, 1, 6, 4]) { %a, %l = attention %q, %q, %q causal(1) scale(1) window(2) "
      "%b, %m = attention %q, %q, %q causal(1) scale(1) window(3) %c, %n = attention %q, %q, %q "
      "causal(1) scale(1) window(3) return a: %a, b: %b, c: %c }"));
  std::size_t count = 0;
  for (std::size_t at = 0; (at = program.text().find("= attention", at)) != std::string::npos; ++at)
    ++count;
  EXPECT_EQ(count, 2u) << program.text();
}

}  // namespace
}  // namespace logitless::test

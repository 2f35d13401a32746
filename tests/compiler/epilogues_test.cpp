// What products add before they store their sums: where that is found, where it is not, and that it
// is the same as before in float64.
#include "compiler/plan/epilogues.h"

#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include "compiler/compiled.h"
#include "compiler/ir/interpreter.h"
#include "compiler/ir/text.h"
#include "compiler/residual_block.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

// x [16, 24] . w [24, 32] and what is done to it.
std::string text(const std::string& statements, const std::string& results) {
  return "graph g(%x: bf16[16, 24], %w: bf16[24, 32], %b: bf16[32], %c: bf16[16], %r: bf16[16, "
         "32], "
         "%v: bf16[32, 24], %y: bf16[16, 24], %u: bf16[16, 24]) {\n  %d = dot %x, %w contract(1; "
         "0) "
         ": bf16[16, 32]\n" +
         statements + "  return " + results + "\n}\n";
}

// The epilogues of the graph's products, in order. Checks that nothing else changed.
std::vector<std::string> found(const std::string& text) {
  const ir::Graph graph = ir::parse(text).graph;
  const ir::WithEpilogues with = ir::fuse_epilogues(graph);
  ir::verify(with.graph);
  EXPECT_EQ(with.origin.size(), static_cast<std::size_t>(with.graph.size()));
  const ir::Tensors inputs = random_inputs(graph, 7);
  EXPECT_LT(difference(ir::interpret(with.graph, inputs), ir::interpret(graph, inputs)), 1e-5)
      << ir::print(with.graph);
  EXPECT_EQ(ir::print(ir::parse(ir::print(with.graph)).graph), ir::print(with.graph));
  std::vector<std::string> list;
  for (const ir::Node& n : with.graph.nodes()) {
    if (n.op == ir::Op::fused_dot) list.push_back(ir::text_of(n.attributes->epilogue));
  }
  return list;
}
using List = std::vector<std::string>;

const std::string kBias =
    "  %s = broadcast %b dims(1) : bf16[16, 32]\n  %a = add %d, %s : bf16[16, 32]\n";

TEST(Epilogues, TakeABias) {
  EXPECT_EQ(found(text(kBias, "a: %a")), List{"bias"});
  EXPECT_EQ(found(text("  %s = broadcast %b dims(1) : bf16[16, 32]\n"
                       "  %a = add %s, %d : bf16[16, 32]\n",
                       "a: %a")),
            List{"bias"});
}

TEST(Epilogues, TakeAResidual) {
  const std::string sum = kBias + "  %z = add %r, %a : bf16[16, 32]\n";
  EXPECT_EQ(found(text(sum, "z: %z")), List{"bias, residual"});
  EXPECT_EQ(found(text("  %z = add %d, %r : bf16[16, 32]\n", "z: %z")), List{"residual"});
}

TEST(Epilogues, LeaveResidualsOfDeepProductsAndThoseThatNobodyStores) {
  // 32 deep, 24 wide.
  EXPECT_EQ(found(text("  %e = dot %r, %v contract(1; 0) : bf16[16, 24]\n"
                       "  %z = add %e, %y : bf16[16, 24]\n",
                       "z: %z, d: %d")),
            List{});
  // The loop that reads the sum computes it.
  EXPECT_EQ(
      found(text("  %z = add %d, %r : bf16[16, 32]\n  %t = tanh %z : bf16[16, 32]\n", "t: %t")),
      List{});
  // What is added is computed in the same loop.
  EXPECT_EQ(
      found(text("  %h = tanh %r : bf16[16, 32]\n  %z = add %d, %h : bf16[16, 32]\n", "z: %z")),
      List{});
}

TEST(Epilogues, AreNotFoundWhereTheyMustNotBe) {
  // Two readers; a result; the same value twice.
  EXPECT_EQ(found(text(kBias + "  %n = neg %d : bf16[16, 32]\n", "a: %a, n: %n")), List{});
  EXPECT_EQ(found(text(kBias, "a: %a, d: %d")), List{});
  EXPECT_EQ(found(text("  %a = add %d, %d : bf16[16, 32]\n", "a: %a")), List{});
  // Along the other dimension; another function.
  EXPECT_EQ(found(text("  %s = broadcast %c dims(0) : bf16[16, 32]\n"
                       "  %a = add %d, %s : bf16[16, 32]\n",
                       "a: %a")),
            List{});
  EXPECT_EQ(found(text("  %s = broadcast %b dims(1) : bf16[16, 32]\n"
                       "  %a = sub %d, %s : bf16[16, 32]\n",
                       "a: %a")),
            List{});
  // f32, and f32 from bf16; rows that begin anywhere; a batch.
  EXPECT_EQ(found("graph g(%x: f32[16, 24], %w: f32[24, 32], %b: f32[32]) {\n"
                  "  %d = dot %x, %w contract(1; 0) : f32[16, 32]\n"
                  "  %s = broadcast %b dims(1) : f32[16, 32]\n"
                  "  %a = add %d, %s : f32[16, 32]\n  return a: %a\n}\n"),
            List{});
  EXPECT_EQ(found("graph g(%x: bf16[16, 24], %w: bf16[24, 32], %b: f32[32]) {\n"
                  "  %d = dot %x, %w contract(1; 0) : f32[16, 32]\n"
                  "  %s = broadcast %b dims(1) : f32[16, 32]\n"
                  "  %a = add %d, %s : f32[16, 32]\n  return a: %a\n}\n"),
            List{});
  EXPECT_EQ(found("graph g(%x: bf16[16, 24], %w: bf16[24, 33], %b: bf16[33]) {\n"
                  "  %d = dot %x, %w contract(1; 0) : bf16[16, 33]\n"
                  "  %s = broadcast %b dims(1) : bf16[16, 33]\n"
                  "  %a = add %d, %s : bf16[16, 33]\n  return a: %a\n}\n"),
            List{});
  EXPECT_EQ(found("graph g(%x: bf16[2, 8, 24], %w: bf16[2, 24, 32], %b: bf16[32]) {\n"
                  "  %d = dot %x, %w batch(0; 0) contract(2; 1) : bf16[2, 8, 32]\n"
                  "  %s = broadcast %b dims(2) : bf16[2, 8, 32]\n"
                  "  %a = add %d, %s : bf16[2, 8, 32]\n  return a: %a\n}\n"),
            List{});
}

List of_program(const CompiledProgram& compiled) {
  List list;
  for (const ir::Instruction& i : CompilerAccess::state(compiled).program.instructions) {
    const auto* gemm = std::get_if<ir::Gemm>(&i.what);
    if (gemm != nullptr && gemm->epilogue.any()) list.push_back(ir::text_of(gemm->epilogue));
  }
  return list;
}

TEST(Epilogues, AreInProgramsOfAGpu) {
  const Graph graph = residual_block(128, DType::bf16);
  CompileOptions options;
  EXPECT_EQ(of_program(compile(graph, options)), List{});
  options.device.kind = DeviceKind::cuda;
  options.device.compute_capability = 90;
  const CompiledProgram with = compile(graph, options);
  EXPECT_EQ(of_program(with), (List{"bias, residual", "bias", "bias", "residual"}));
  EXPECT_NE(with.explain().find(
                "products with epilogues: 1 with bias, residual; 2 with bias; 1 with residual\n"),
            std::string::npos)
      << with.explain();
  EXPECT_NE(with.report_json().find("\"epilogue\": \"bias, residual\""), std::string::npos);
  options.epilogues = false;
  const CompiledProgram without = compile(graph, options);
  EXPECT_EQ(of_program(without), List{});
  EXPECT_EQ(without.explain().find("epilogue"), std::string::npos);
}

TEST(Epilogues, AreForAGpuAlone) {
  const std::string text =
      "graph g(%x: bf16[8, 8], %b: bf16[8]) {\n"
      "  %d = fused_dot %x, %x, %b contract(1; 0) bias(1) : bf16[8, 8]\n  return d: %d\n}\n";
  try {
    compile(Graph::parse(text));
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("fused_dot"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace logitless::test

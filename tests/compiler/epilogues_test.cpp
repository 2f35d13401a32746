// Epilogues of matrix products: where they are found, where not, and equal results in float64.
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

// Returns a program with x [16, 24] . w [24, 32] and these statements on the result.
std::string text(const std::string& statements, const std::string& results) {
  return "graph g(%x: bf16[16, 24], %w: bf16[24, 32], %b: bf16[32], %c: bf16[16], %r: bf16[16, "
         "32], "
         "%v: bf16[32, 24], %y: bf16[16, 24], %u: bf16[16, 24]) {\n  %d = dot %x, %w contract(1; "
         "0) "
         ": bf16[16, 32]\n" +
         statements + "  return " + results + "\n}\n";
}

// Returns the epilogues of the graph's products, in order. Checks that nothing else changed.
std::vector<std::string> found(const std::string& text) {
  const ir::Graph graph = ir::parse(text).graph;
  const ir::WithEpilogues with = ir::fuse_epilogues(graph, /*with_gelu=*/true);
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
  // The product is 32 deep and 24 wide.
  EXPECT_EQ(found(text("  %e = dot %r, %v contract(1; 0) : bf16[16, 24]\n"
                       "  %z = add %e, %y : bf16[16, 24]\n",
                       "z: %z, d: %d")),
            List{});
  // The loop that reads the sum computes it.
  EXPECT_EQ(
      found(text("  %z = add %d, %r : bf16[16, 32]\n  %t = tanh %z : bf16[16, 32]\n", "t: %t")),
      List{});
  // The same loop computes the added value.
  EXPECT_EQ(
      found(text("  %h = tanh %r : bf16[16, 32]\n  %z = add %d, %h : bf16[16, 32]\n", "z: %z")),
      List{});
}

// Returns the text of gelu (tanh form) of %NAME, as %g, of this shape.
std::string gelu_of(const std::string& name, const std::string& shape = "bf16[16, 32]",
                    const std::string& cube = "0.044715") {
  const auto line = [&](const std::string& text) { return "  " + text + " : " + shape + "\n"; };
  return line("%k0 = constant value(" + cube + ")") +
         line("%k1 = constant value(0.7978845608028654)") + line("%k2 = constant value(1)") +
         line("%k3 = constant value(0.5)") + line("%x2 = mul " + name + ", " + name) +
         line("%x3 = mul %x2, " + name) + line("%cube = mul %x3, %k0") +
         line("%in = add " + name + ", %cube") + line("%v1 = mul %in, %k1") +
         line("%t = tanh %v1") + line("%t1 = add %t, %k2") + line("%half = mul " + name + ", %k3") +
         line("%g = mul %half, %t1");
}

TEST(Epilogues, TakeAGeluAndKeepWhatItIsOf) {
  EXPECT_EQ(found(text(kBias + gelu_of("%a"), "g: %g, a: %a")), List{"bias, gelu"});
  EXPECT_EQ(found(text(gelu_of("%d"), "g: %g, d: %d")), List{"gelu"});
  // Only a matrix product reads the gelu, and nothing else the sum.
  EXPECT_EQ(found(text(kBias + gelu_of("%a") + "  %e = dot %g, %v contract(1; 0) : bf16[16, 24]\n",
                       "e: %e")),
            List{"bias, gelu"});
  // x sigmoid(2 u) is the same function.
  EXPECT_EQ(found(text(kBias + gelu_of("%a") +
                           "  %u2 = add %v1, %v1 : bf16[16, 32]\n"
                           "  %s2 = sigmoid %u2 : bf16[16, 32]\n"
                           "  %h = mul %a, %s2 : bf16[16, 32]\n",
                       "h: %h, a: %a")),
            List{"bias, gelu"});
  // The intermediate values are f32.
  EXPECT_EQ(found(text(kBias + "  %f = cast %a : f32[16, 32]\n" + gelu_of("%f", "f32[16, 32]") +
                           "  %h = cast %g : bf16[16, 32]\n",
                       "h: %h, a: %a")),
            List{"bias, gelu"});
  // The second of two equal gelus is recomputed: other passes decide that.
  EXPECT_EQ(found(text(kBias + gelu_of("%a") +
                           "  %again = mul %t1, %half : bf16[16, 32]\n"
                           "  %e = dot %again, %v contract(1; 0) : bf16[16, 24]\n",
                       "g: %g, e: %e")),
            List{"bias, gelu"});
}

TEST(Epilogues, LeaveOtherFunctionsThanGelu) {
  EXPECT_EQ(found(text(kBias + gelu_of("%a", "bf16[16, 32]", "0.0447151"), "g: %g, a: %a")),
            List{"bias"});
  EXPECT_EQ(
      found(text(kBias + "  %k = constant value(0.7071067811865476) : bf16[16, 32]\n"
                         "  %i = mul %a, %k : bf16[16, 32]\n  %f = erf %i : bf16[16, 32]\n"
                         "  %k1 = constant value(1) : bf16[16, 32]\n"
                         "  %f1 = add %f, %k1 : bf16[16, 32]\n"
                         "  %kh = constant value(0.5) : bf16[16, 32]\n"
                         "  %h = mul %a, %kh : bf16[16, 32]\n  %g = mul %h, %f1 : bf16[16, 32]\n",
                 "g: %g, a: %a")),
      List{"bias"});
  // No gelu of the sum: of another sum; read by a loop alone; with unaligned rows.
  EXPECT_EQ(
      found(text(kBias + "  %b2 = mul %a, %r : bf16[16, 32]\n" + gelu_of("%b2"), "g: %g, a: %a")),
      List{"bias"});
  EXPECT_EQ(
      found(text(kBias + gelu_of("%a") + "  %n = mul %g, %r : bf16[16, 32]\n", "n: %n, a: %a")),
      List{"bias"});
  EXPECT_EQ(found("graph g(%p: bf16[16, 24], %w: bf16[24, 33]) {\n"
                  "  %a = dot %p, %w contract(1; 0) : bf16[16, 33]\n" +
                  gelu_of("%a", "bf16[16, 33]") + "  return g: %g, a: %a\n}\n"),
            List{});
  EXPECT_EQ(found("graph g(%p: f32[16, 24], %w: f32[24, 32]) {\n"
                  "  %a = dot %p, %w contract(1; 0) : f32[16, 32]\n" +
                  gelu_of("%a", "f32[16, 32]") + "  return g: %g, a: %a\n}\n"),
            List{});
}

// Returns the text of dy gelu'(%r) of the product, as %q.
std::string gradient_text(const std::string& cube = "0.044715") {
  const auto line = [](const std::string& text) { return "  " + text + " : bf16[16, 32]\n"; };
  return gelu_of("%r", "bf16[16, 32]", cube) + line("%k4 = constant value(" + cube + ")") +
         line("%k5 = constant value(3)") + line("%d1 = mul %d, %t1") + line("%p0 = mul %d1, %k3") +
         line("%t2 = mul %t, %t") + line("%t3 = sub %k2, %t2") + line("%d2 = mul %d, %half") +
         line("%d3 = mul %d2, %t3") + line("%d4 = mul %d3, %k1") + line("%x4 = mul %x2, %k4") +
         line("%x5 = mul %x4, %k5") + line("%x6 = add %x5, %k2") + line("%d5 = mul %d4, %x6") +
         line("%q = add %p0, %d5");
}

TEST(Epilogues, TakeAGelusGradient) {
  EXPECT_EQ(found(text(gradient_text(), "q: %q")), List{"gelu gradient"});
  // Functions of x alone may have other readers.
  EXPECT_EQ(found(text(gradient_text(), "q: %q, g: %g")), List{"gelu gradient"});
}

TEST(Epilogues, LeaveAGelusGradientWhoseParts) {
  // The parts are results: the product, and an intermediate value.
  EXPECT_EQ(found(text(gradient_text(), "q: %q, d: %d")), List{});
  EXPECT_EQ(found(text(gradient_text(), "q: %q, d4: %d4")), List{});
  // The constant differs.
  EXPECT_EQ(found(text(gradient_text("0.0447"), "q: %q")), List{});
  // No reader stores the gradient.
  EXPECT_EQ(found(text(gradient_text() + "  %n = mul %q, %r : bf16[16, 32]\n", "n: %n")), List{});
}

TEST(Epilogues, AreNotFoundWhereTheyMustNotBe) {
  // The sum has two readers; is a result; is added to itself.
  EXPECT_EQ(found(text(kBias + "  %n = neg %d : bf16[16, 32]\n", "a: %a, n: %n")), List{});
  EXPECT_EQ(found(text(kBias, "a: %a, d: %d")), List{});
  EXPECT_EQ(found(text("  %a = add %d, %d : bf16[16, 32]\n", "a: %a")), List{});
  // The bias is along the other dimension; the function is another.
  EXPECT_EQ(found(text("  %s = broadcast %c dims(0) : bf16[16, 32]\n"
                       "  %a = add %d, %s : bf16[16, 32]\n",
                       "a: %a")),
            List{});
  EXPECT_EQ(found(text("  %s = broadcast %b dims(1) : bf16[16, 32]\n"
                       "  %a = sub %d, %s : bf16[16, 32]\n",
                       "a: %a")),
            List{});
  // The dtype is f32, or f32 from bf16; rows are unaligned; there is a batch.
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
  EXPECT_EQ(of_program(with),
            (List{"bias, residual", "bias, gelu", "bias", "gelu gradient", "residual"}));
  EXPECT_NE(with.explain().find("products with epilogues:\n  "), std::string::npos);
  for (const std::string line : {"x 64: bias, residual\n", ": bias, gelu\n", ": gelu gradient\n"})
    EXPECT_NE(with.explain().find(line), std::string::npos) << with.explain();
  EXPECT_NE(with.report_json().find("\"epilogue\": \"bias, residual\""), std::string::npos);
  // Gelu epilogues are used only where they were measured.
  options.device.compute_capability = 80;
  EXPECT_EQ(of_program(compile(graph, options)),
            (List{"bias, residual", "bias", "bias", "residual"}));
  options.device.compute_capability = 90;
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

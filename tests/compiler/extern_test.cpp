// Operations that the caller runs: what is refused, what compiled programs contain, and that
// chunked calls equal full ones.
#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/context.h>
#include <logitless/error.h>

#include <cmath>

#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

CompileOptions with_externs(std::size_t budget = 0) {
  CompileOptions options;
  options.externs = true;
  options.memory_budget = budget;
  return options;
}

std::string program(const std::string& statement) {
  return "graph g(%x: f32[8, 4], %w: f32[3, 4]) { " + statement + " return y: %y }";
}

std::string refusal(const std::string& text, const CompileOptions& options = with_externs()) {
  try {
    (void)compile(Graph::parse(text), options);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(Extern, IsRefusedByName) {
  const std::string along = "%y = extern %x, %w call(0) result(0) along(";
  const auto expect = [&](const std::string& rows, const std::string& type,
                          const std::string& message) {
    const std::string text = program(along + rows + ") : " + type);
    EXPECT_NE(refusal(text).find(message), std::string::npos) << refusal(text);
  };
  expect("0, whole", "f32[8, 3]", "along names 2 dimensions, expected 2 of operands and one");
  expect("2, whole, 0", "f32[8, 3]", "along names dimension 2 of f32[8, 4]");
  expect("0, whole, 0; 0, whole, sum", "f32[8, 3]", "dimension 0 of f32[8, 4] twice");
  expect("0, 0, sum", "f32[8, 3]", "along meets dimension 0 of f32[3, 4] with one of size 8");
  expect("0, whole, 1", "f32[8, 3]", "along meets dimension 1 of f32[8, 3] with one of size 8");
  expect("whole, whole, 0", "f32[8, 3]", "along cuts no operand");
  const std::string untyped = program("%y = extern %x, %w call(0) result(0)");
  EXPECT_NE(refusal(untyped).find("needs the type of its result"), std::string::npos);
}

TEST(Extern, IsCompiledWhereItIsAskedForAndNeverRun) {
  const std::string text = program("%y = extern %x, %w call(7) result(1) : f32[8, 3]");
  EXPECT_NE(refusal(text, {}).find("y (extern) f32[8, 3] is an operation that the caller runs; "
                                   "expected the option externs"),
            std::string::npos)
      << refusal(text, {});
  const CompiledProgram made = compile(Graph::parse(text), with_externs());
  EXPECT_NE(made.text().find("extern %x, %w call(7) result(1) : f32[8, 3]"), std::string::npos);
  EXPECT_NE(made.explain().find("extern 7 of 2 operands"), std::string::npos) << made.explain();
  std::vector<float> x(32), w(12), y(24);
  const void* const parameters[] = {x.data(), w.data()};
  void* const results[] = {y.data()};
  alignas(64) std::byte arena[64];
  EXPECT_THROW(made.run(parameters, results, arena), Unsupported);
  EXPECT_THROW((void)made.prepare(Context(ContextOptions())), Unsupported);
}

TEST(Extern, HasNoGradientAndNoValueOfItsOwn) {
  const ir::Graph graph =
      ir::parse(program("%y = extern %x, %w call(0) result(0) : f32[8, 3]")).graph;
  EXPECT_THROW(ir::interpret(graph, random_inputs(graph, 1)), InvalidArgument);
  const std::string text =
      "graph g(%x: f32[8, 4]) { %y = extern %x call(0) result(0) : f32[8, 4] return y: %y "
      "differentiate y wrt %x }";
  EXPECT_NE(refusal(text).find("extern"), std::string::npos) << refusal(text);
}

TEST(Extern, IsOneForEqualCallsAlone) {
  const auto externs = [](const std::string& second) {
    const std::string text =
        "graph g(%x: f32[8, 4]) { %a = extern %x call(0) result(0) : f32[8, 4] %b = extern %x " +
        second + " : f32[8, 4] return a: %a, b: %b }";
    const std::string made = compile(Graph::parse(text), with_externs()).text();
    std::size_t count = 0;
    for (std::size_t at = 0; (at = made.find("= extern", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  EXPECT_EQ(externs("call(0) result(0)"), 1U);
  EXPECT_EQ(externs("call(1) result(0)"), 2U);
  EXPECT_EQ(externs("call(0) result(1)"), 2U);
}

// Computes squares of rows by call 0, and the sum of x^T d over rows by call 1.
ir::Tensor value(const ir::Node& n, const std::vector<const ir::Tensor*>& operands) {
  ir::Tensor out = *operands[0];
  if (n.attributes->call.id == 0) {
    for (double& v : out.data) v = v * v;
    return out;
  }
  const ir::Tensor &x = *operands[0], &d = *operands[1];
  const std::int64_t columns = x.shape[1], others = d.shape[1];
  out = {{columns, others}, std::vector<double>(static_cast<std::size_t>(columns * others))};
  for (std::int64_t r = 0; r < x.shape[0]; ++r) {
    for (std::int64_t i = 0; i < columns * others; ++i)
      out.data[static_cast<std::size_t>(i)] +=
          x.data[static_cast<std::size_t>(r * columns + i / others)] *
          d.data[static_cast<std::size_t>(r * others + i % others)];
  }
  return out;
}

// An extern between two wide products is inside their loop, and its sum is merged over chunks.
TEST(Extern, IsPartOfALoopAlongItsRows) {
  const std::string text =
      "graph g(%x: f32[512, 8], %w: f32[8, 256]) { %z = dot %x, %w contract(1; 0) %e = exp %z %s = "
      "extern %e call(0) result(0) along(0, 0; 1, 1) : f32[512, 256] %t = exp %s %u = extern %x, "
      "%t call(1) result(0) along(0, 0, sum) : f32[8, 256] %l = reduce_sum %t dims(1) return l: "
      "%l, u: %u }";
  const Graph graph = Graph::parse(text);
  const CompiledProgram made = compile(graph, with_externs(std::size_t{64} << 10));
  EXPECT_LE(made.arena_bytes(), std::size_t{70} << 10) << made.explain();
  const ir::Graph chunked = ir::parse(made.text()).graph;
  const ir::Graph& whole = GraphAccess::of(graph);
  ir::Tensors inputs = random_inputs(whole, 3);
  for (double& v : inputs.at("w").data) v *= 0.01;
  EXPECT_LT(difference(ir::interpret(chunked, inputs, value), ir::interpret(whole, inputs, value)),
            1e-12);
  EXPECT_NE(made.text().find(" : f32[c"), std::string::npos) << made.text();
}

// PyTorch runs one operation after the other: each has a launch, and reads and writes its value.
TEST(Extern, TheTimeOfACallersProgramOnAGpuCountsEachOperation) {
  const std::string text =
      "graph g(%x: f32[512, 512]) { %a = exp %x %b = neg %a %c = exp %b %d = neg %c return d: %d }";
  CompileOptions options = with_externs();
  options.device.kind = DeviceKind::cuda;
  options.device.compute_capability = 90;
  const double by_caller = compile(Graph::parse(text), options).predicted_seconds();
  options.externs = false;
  EXPECT_GT(by_caller, 4.0 * compile(Graph::parse(text), options).predicted_seconds());
}

}  // namespace
}  // namespace logitless::test

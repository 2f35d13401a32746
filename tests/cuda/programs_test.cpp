// Compiled programs on a GPU against the float64 interpreter: programs that other chunkers give up
// on, random ones, and each operation by itself.
#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include "compiler/graph_access.h"
#include "compiler/program_checks.h"
#include "compiler/run.h"
#include "cuda/run_program.h"

namespace logitless::test {
namespace {

class GpuPrograms : public testing::TestWithParam<NamedProgram> {
 protected:
  void SetUp() override {
    if (!gpu()) GTEST_SKIP() << "no CUDA device";
  }
};

ProgramDevice device() {
  ProgramDevice out;
  out.options.device = *gpu();
  out.run = [](const CompiledProgram& program, const ir::Tensors& inputs, int times,
               const ir::Tensors& before) {
    return execute_on_gpu(program, inputs, times, nullptr, before);
  };
  return out;
}

TEST_P(GpuPrograms, SameNumbersInFloat64ForAnyChunks) {
  expect_float64(device(), GetParam(), {1, 5, 7});
}
TEST_P(GpuPrograms, FloatIsWithinItsRounding) { expect_float32(device(), GetParam()); }
TEST_P(GpuPrograms, Bfloat16IsRoundedOnce) { expect_bfloat16(device(), GetParam()); }
TEST_P(GpuPrograms, AddToWhatIsThere) { expect_added(device(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, GpuPrograms, testing::ValuesIn(programs()),
                         [](const auto& test) { return test.param.name; });

TEST(GpuProgram, RandomOnes) {
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  for (std::uint64_t seed = 1; seed <= 20; ++seed) expect_random(device(), seed);
}

// Loss of 301 classes, whose rows would start at unaligned addresses, and its gradients.
TEST(GpuProgram, PutsRowsOfAnOddLengthApart) {
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  Graph graph("words");
  const Value x = graph.parameter("x", DType::bf16, {90, 64}),
              w = graph.parameter("w", DType::bf16, {64, 301});
  const Value logits = cast(matmul(x, w), DType::f32);
  const Value loss = sum(logsumexp(logits, {1}) + sum(square(tanh(logits)), {1}), {0});
  graph.result("loss", loss);
  const std::vector<Value> gradients = graph.gradients({loss}, {x, w});
  graph.result("d_x", gradients[0]);
  graph.result("d_w", gradients[1]);
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), {});
  const ir::Tensors inputs = random_inputs(plain, 3);
  const ir::Tensors wanted = ir::interpret(plain, inputs);
  for (const int chunks : {1, 4}) {
    SCOPED_TRACE(chunks);
    CompileOptions options;
    options.device = *gpu();
    options.head_engine = false;
    options.chunks = chunks;
    const CompiledProgram compiled = compile(graph, options);
    const ir::Tensors once = execute_on_gpu(compiled, inputs);
    EXPECT_LT(difference(once, wanted), 0.03);
    EXPECT_EQ(difference(execute_on_gpu(compiled, inputs, 4), once), 0.0);
  }
}

// The same rows in a loop, whose rounds of 32 and 26 stack what products contract after it.
TEST(GpuProgram, StacksRowsOfAnOddLengthApart) {
  const Graph graph = Graph::parse(
      "graph g(%x: bf16[90, 64], %w: bf16[64, 301]) {\n"
      "  %y = loop c extent(90) chunk(32) (%first, %p = slice %x axis(0) factor(1), %q = whole %w) "
      "{\n    %z = dot %p, %q contract(1; 0) : f32[c, 301]\n    %t = tanh %z\n"
      "    %y = cast %t : bf16[c, 301]\n    return y: stack %y axis(0) factor(1)\n  }\n"
      "  %d_x = dot %y, %w contract(1; 1) : f32[90, 64]\n"
      "  %d_w = dot %x, %y contract(0; 0) : f32[64, 301]\n"
      "  return d_x: %d_x, d_w: %d_w\n}\n");
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  CompileOptions options;
  options.device = *gpu();
  options.chunk = false;
  const CompiledProgram compiled = compile(graph, options);
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), {});
  const ir::Tensors inputs = random_inputs(plain, 5);
  const ir::Tensors once = execute_on_gpu(compiled, inputs);
  EXPECT_LT(difference(once, ir::interpret(plain, inputs)), 0.03);
  EXPECT_EQ(difference(execute_on_gpu(compiled, inputs, 4), once), 0.0);
}

// A 16-bit product that contracts 1003 elements of a value with aligned rows and of a parameter
// without: fp32 sums, a copy of the parameter and a result with rows at odd addresses.
TEST(GpuProgram, MultipliesOddSizesInBlocks) {
  Graph graph("odd");
  const Value x = graph.parameter("x", DType::bf16, {352, 1003}),
              w = graph.parameter("w", DType::bf16, {1003, 801});
  graph.result("y", matmul(tanh(x), w));
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  const std::string report = compile(graph, options).explain();
  EXPECT_NE(report.find("product 352 x 801 x 1003 bf16 to bf16, in blocks"), std::string::npos)
      << report;
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  options.device = *gpu();
  const CompiledProgram compiled = compile(graph, options);
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), {});
  const ir::Tensors inputs = random_inputs(plain, 4);
  const ir::Tensors wanted = ir::interpret(plain, inputs);
  const ir::Tensors once = execute_on_gpu(compiled, inputs);
  EXPECT_LT(difference(once, wanted), 0.01);
  EXPECT_EQ(difference(execute_on_gpu(compiled, inputs, 2), once), 0.0);
}

// Runs without a GPU, too.
TEST(GpuProgram, IsCompiledAnywhereAndRunNowhereElse) {
  const Graph graph = programs().front().make(DType::f32);
  CompileOptions options;
  options.sizes = programs().front().sizes;
  options.device.kind = DeviceKind::cuda;
  const CompiledProgram compiled = compile(graph, options);
  EXPECT_GT(compiled.arena_bytes(), 0u);
  EXPECT_EQ(compiled.device().kind, DeviceKind::cuda);
  EXPECT_FALSE(compiled.explain().empty());
  EXPECT_THROW(compiled.prepare(Context()), InvalidArgument);
  std::vector<const void*> parameters(compiled.parameters().size(), &options);
  std::vector<void*> results(compiled.results().size(), &options);
  alignas(256) std::byte arena[256];
  EXPECT_THROW(compiled.run(parameters, results, arena), InvalidArgument);
}

TEST(GpuProgram, OptionsThatDoNotFitAreRefused) {
  const Graph graph = programs().front().make(DType::f32);
  CompileOptions options;
  options.sizes = programs().front().sizes;
  options.device.kind = DeviceKind::cuda;
  options.threads = 2;
  EXPECT_THROW(compile(graph, options), InvalidArgument);
  options.threads = 0;
  options.device.compute_capability = 70;
  EXPECT_THROW(compile(graph, options), InvalidArgument);
  options.device = {};
  options.device.threads = 2;
  EXPECT_THROW(compile(graph, options), InvalidArgument);
  options.device = {};
  EXPECT_THROW(compile(graph, options).prepare(Context()), InvalidArgument);
}

}  // namespace
}  // namespace logitless::test

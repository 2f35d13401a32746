// Programs that other chunkers give up on are chunked here, with the same results.
#include "compiler/programs.h"

#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include <tuple>

#include "compiler/analysis/region.h"
#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/run.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

CompileOptions options_of(const NamedProgram& program, std::size_t budget,
                          std::int64_t chunks = 0) {
  CompileOptions options;
  options.sizes = program.sizes;
  options.memory_budget = budget;
  options.chunks = chunks;
  options.threads = 2;
  return options;
}

// Returns the most elements of a value in memory, outside or inside of loops.
std::int64_t largest(const ir::Graph& graph) {
  std::int64_t most = 0;
  for (const ir::Node& n : graph.nodes()) {
    if (n.op == ir::Op::parameter) continue;
    for (const ir::Type& t : n.results) most = std::max(most, ir::elements_of(t));
  }
  return most;
}

ir::Graph graph_of(const CompiledProgram& program) { return ir::parse(program.text()).graph; }

class Programs : public testing::TestWithParam<NamedProgram> {};

TEST_P(Programs, BigValuesVanish) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::f32);
  const CompiledProgram compiled = compile(graph, options_of(p, 1));

  ASSERT_NE(compiled.text().find("loop"), std::string::npos) << compiled.explain();
  if (p.largest > 0) {
    EXPECT_LT(largest(graph_of(compiled)), p.largest) << compiled.explain() << compiled.text();
  }
  EXPECT_LT(compiled.arena_bytes(), compiled.unchunked_arena_bytes());
}

TEST_P(Programs, SameNumbersInFloat64ForAnyChunks) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::f64);
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), p.sizes);
  const ir::Tensors inputs = random_inputs(plain, 1);
  const ir::Tensors expected = ir::interpret(plain, inputs);
  for (const std::int64_t chunks : {1, 2, 5, 7, 3000}) {
    SCOPED_TRACE(chunks);
    const CompiledProgram compiled = compile(graph, options_of(p, 1, chunks));
    EXPECT_LT(difference(ir::interpret(graph_of(compiled), inputs), expected), 1e-12);
    EXPECT_LT(difference(execute(compiled, inputs), expected), 1e-12);
  }
}

TEST_P(Programs, FloatIsWithinItsRounding) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::f32);
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), p.sizes);
  const ir::Tensors inputs = random_inputs(plain, 2);
  const ir::Tensors expected = ir::interpret(plain, inputs);
  EXPECT_LT(difference(execute(compile(graph, options_of(p, 1)), inputs), expected), 2e-5);
  CompileOptions unchunked = options_of(p, 0);
  unchunked.chunk = false;
  EXPECT_LT(difference(execute(compile(graph, unchunked), inputs), expected), 2e-5);
}

TEST_P(Programs, Bfloat16IsRoundedOnce) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::bf16);
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), p.sizes);
  const ir::Tensors inputs = random_inputs(plain, 3);
  const ir::Tensors expected = ir::interpret(plain, inputs);
  CompileOptions unchunked = options_of(p, 0);
  unchunked.chunk = false;
  const double whole = difference(execute(compile(graph, unchunked), inputs), expected);
  const double chunked = difference(execute(compile(graph, options_of(p, 1)), inputs), expected);
  EXPECT_LT(whole, 0.03);
  // Sums over chunks are fp32: chunking adds no error beyond the order of sums.
  EXPECT_LT(chunked, std::max(1.3 * whole, 0.008));
}

TEST_P(Programs, AddToWhatIsThere) {
  const NamedProgram& p = GetParam();
  for (const auto& [dtype, budget, tolerance] :
       {std::tuple{DType::f32, std::size_t{0}, 2e-5}, {DType::f64, std::size_t{1}, 1e-12}}) {
    const Graph graph = p.make(dtype);
    const ir::Graph plain = ir::bind(GraphAccess::of(graph), p.sizes);
    const ir::Tensors inputs = random_inputs(plain, 5);
    CompileOptions options = options_of(p, budget);
    const ir::Tensors before = random_sums(compile(graph, options), 6);
    options.added = names_of(before);
    const CompiledProgram compiled = compile(graph, options);
    EXPECT_LT(difference(execute(compiled, inputs, nullptr, before),
                         sum(ir::interpret(plain, inputs), before)),
              tolerance)
        << compiled.explain();
  }
}

INSTANTIATE_TEST_SUITE_P(All, Programs, testing::ValuesIn(programs()),
                         [](const auto& test) { return test.param.name; });

TEST(Compile, SameBitsForAnyThreadsAndEveryRun) {
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    const Graph graph = p.make(DType::f32);
    const ir::Tensors inputs = random_inputs(ir::bind(GraphAccess::of(graph), p.sizes), 4);
    CompileOptions options = options_of(p, 1, 4);
    options.threads = 1;
    const ir::Tensors one = execute(compile(graph, options), inputs);
    options.threads = 3;
    const CompiledProgram three = compile(graph, options);
    EXPECT_EQ(difference(execute(three, inputs), one), 0.0);
    EXPECT_EQ(difference(execute(three, inputs), one), 0.0);
  }
}

// One parameter has the gradients of a matrix product and of a gather, like a tied embedding table.
TEST(Compile, SumsOfSeveralGradientsTakeNoMemoryOfTheirOwn) {
  Graph graph("tied");
  const Value w = graph.parameter("w", DType::f32, {600, 64});
  const Value x = take(w, graph.parameter("t", DType::i64, {8}));
  const Value y = dot(tanh(x), w, {.contract_a = {1}, .contract_b = {1}});
  graph.result("d_w", graph.gradients({sum(square(y), {0, 1})}, {w})[0]);
  CompileOptions options;
  options.threads = 1;
  options.chunk = false;
  const std::size_t written = compile(graph, options).arena_bytes();
  options.added = {"d_w"};
  EXPECT_EQ(compile(graph, options).arena_bytes(), written);
  EXPECT_LT(written, std::size_t{2 * 600 * 64 * 4}) << "no room for both";
}

TEST(Compile, OnlyResultsThatAreFloatsAreAddedTo) {
  const NamedProgram& p = programs().front();
  const auto expect = [&](DType dtype, const std::string& name, const std::string& text) {
    CompileOptions options = options_of(p, 0);
    options.added = {name};
    try {
      compile(p.make(dtype), options);
      ADD_FAILURE() << "expected: " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  expect(DType::f32, "nobody", "there is no result 'nobody'; there are ");
  expect(DType::bf16, p.make(DType::bf16).result_names().back(), "is bf16, expected f32 or f64");
}

TEST(Compile, RandomPrograms) {
  const std::uint64_t programs = kThreadSanitizer ? 30 : kAddressSanitizer ? 40 : 150;
  for (std::uint64_t seed = 1; seed <= programs; ++seed) {
    SCOPED_TRACE(seed);
    const Graph graph = random_program(seed);
    const ir::Graph& plain = GraphAccess::of(graph);
    const ir::Tensors inputs = random_inputs(plain, seed);
    const ir::Tensors expected = ir::interpret(plain, inputs);
    CompileOptions options;
    options.threads = 2;
    options.memory_budget = seed % 2 == 0 ? 1 : 0;
    options.chunks = static_cast<std::int64_t>(seed % 5);
    const CompiledProgram compiled = compile(graph, options);
    constexpr std::size_t kPointers = 1024;  // to the buffers of loops
    EXPECT_LE(compiled.arena_bytes(), compiled.unchunked_arena_bytes() + kPointers);
    EXPECT_LT(difference(ir::interpret(graph_of(compiled), inputs), expected), 1e-11)
        << compiled.text();
    EXPECT_LT(difference(execute(compiled, inputs), expected), 1e-11) << compiled.text();
    const ir::Tensors before = random_sums(compiled, seed);
    options.added = names_of(before);
    EXPECT_LT(difference(execute(compile(graph, options), inputs, nullptr, before),
                         sum(expected, before)),
              1e-11);
  }
}

}  // namespace
}  // namespace logitless::test

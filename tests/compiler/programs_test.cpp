// Programs that other chunkers give up on are chunked here, with the same results.
#include <gtest/gtest.h>
#include <logitless/error.h>

#include <algorithm>

#include "compiler/analysis/region.h"
#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/program_checks.h"
#include "compiler/run.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

ProgramDevice cpu() {
  ProgramDevice out;
  out.options.threads = 2;
  out.run = [](const CompiledProgram& program, const ir::Tensors& inputs, int,
               const ir::Tensors& before) { return execute(program, inputs, nullptr, before); };
  return out;
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

class Programs : public testing::TestWithParam<NamedProgram> {};

TEST_P(Programs, BigValuesVanish) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::f32);
  const CompiledProgram compiled = compile(graph, cpu().options_of(p, 1));

  ASSERT_NE(compiled.text().find("loop"), std::string::npos) << compiled.explain();
  if (p.largest > 0) {
    EXPECT_LT(largest(ir::parse(compiled.text()).graph), p.largest)
        << compiled.explain() << compiled.text();
  }
  EXPECT_LT(compiled.arena_bytes(), compiled.unchunked_arena_bytes());
}

// No number depends on a sanitizer, and its minutes go to the interpreter. It sees a shorter last
// chunk and chunks of one row; threads share memory in the same way with either.
std::vector<std::int64_t> chunk_counts() {
  if (kThreadSanitizer) return {7};
  if (kAddressSanitizer) return {7, 3000};
  return {1, 2, 5, 7, 3000};
}

TEST_P(Programs, SameNumbersInFloat64ForAnyChunks) {
  expect_float64(cpu(), GetParam(), chunk_counts());
}
TEST_P(Programs, FloatIsWithinItsRounding) { expect_float32(cpu(), GetParam()); }
TEST_P(Programs, Bfloat16IsRoundedOnce) { expect_bfloat16(cpu(), GetParam()); }
TEST_P(Programs, AddToWhatIsThere) { expect_added(cpu(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Programs, testing::ValuesIn(programs()),
                         [](const auto& test) { return test.param.name; });

TEST(Compile, SameBitsForAnyThreadsAndEveryRun) {
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    const Graph graph = p.make(DType::f32);
    const ir::Tensors inputs = random_inputs(ir::bind(GraphAccess::of(graph), p.sizes), 4);
    CompileOptions options = cpu().options_of(p, 1, 4);
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
    CompileOptions options = cpu().options_of(p, 0);
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
  const std::uint64_t programs = kThreadSanitizer ? 15 : kAddressSanitizer ? 40 : 150;
  for (std::uint64_t seed = 1; seed <= programs; ++seed) expect_random(cpu(), seed);
}

}  // namespace
}  // namespace logitless::test

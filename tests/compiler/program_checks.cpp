#include "compiler/program_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

// A program, inputs, and the interpreter's results.
struct Case {
  Case(const NamedProgram& program, DType dtype, std::uint64_t seed)
      : graph(program.make(dtype)),
        plain(ir::bind(GraphAccess::of(graph), program.sizes)),
        inputs(random_inputs(plain, seed)),
        expected(ir::interpret(plain, inputs)) {}

  const Graph graph;
  const ir::Graph plain;
  const ir::Tensors inputs, expected;
};

}  // namespace

CompileOptions ProgramDevice::options_of(const NamedProgram& program, std::size_t budget,
                                         std::int64_t chunks) const {
  CompileOptions out = options;
  out.sizes = program.sizes;
  out.memory_budget = budget;
  out.chunks = chunks;
  return out;
}

void expect_float64(const ProgramDevice& device, const NamedProgram& program,
                    const std::vector<std::int64_t>& chunks) {
  const Case c(program, DType::f64, 1);
  for (const std::int64_t count : chunks) {
    SCOPED_TRACE(count);
    const CompiledProgram compiled = compile(c.graph, device.options_of(program, 1, count));
    const ir::Graph chunked = ir::parse(compiled.text()).graph;
    EXPECT_LT(difference(ir::interpret(chunked, c.inputs), c.expected), 1e-12);
    EXPECT_LT(difference(device.run(compiled, c.inputs, 1, {}), c.expected), 1e-12);
  }
}

void expect_float32(const ProgramDevice& device, const NamedProgram& program) {
  const Case c(program, DType::f32, 2);
  for (const bool chunk : {true, false}) {
    CompileOptions options = device.options_of(program, chunk ? 1 : 0);
    options.chunk = chunk;
    const CompiledProgram compiled = compile(c.graph, options);
    const ir::Tensors once = device.run(compiled, c.inputs, 1, {});
    EXPECT_LT(difference(once, c.expected), 2e-5) << compiled.explain();
    EXPECT_EQ(difference(device.run(compiled, c.inputs, 4, {}), once), 0.0) << "other bits";
  }
}

void expect_bfloat16(const ProgramDevice& device, const NamedProgram& program) {
  const Case c(program, DType::bf16, 3);
  const auto error = [&](const CompileOptions& options) {
    return difference(device.run(compile(c.graph, options), c.inputs, 1, {}), c.expected);
  };
  CompileOptions unchunked = device.options_of(program, 0);
  unchunked.chunk = false;
  const double whole = error(unchunked);
  EXPECT_LT(whole, 0.03);
  EXPECT_LT(error(device.options_of(program, 1)), std::max(1.3 * whole, 0.008));
}

void expect_added(const ProgramDevice& device, const NamedProgram& program) {
  for (const auto& [dtype, budget, tolerance] :
       {std::tuple{DType::f32, std::size_t{0}, 2e-5}, {DType::f64, std::size_t{1}, 1e-12}}) {
    const Case c(program, dtype, 5);
    CompileOptions options = device.options_of(program, budget);
    const ir::Tensors before = random_sums(compile(c.graph, options), 6);
    options.added = names_of(before);
    const CompiledProgram compiled = compile(c.graph, options);
    EXPECT_LT(difference(device.run(compiled, c.inputs, 1, before), sum(c.expected, before)),
              tolerance)
        << compiled.explain();
  }
}

void expect_random(const ProgramDevice& device, std::uint64_t seed) {
  SCOPED_TRACE(seed);
  const Graph graph = random_program(seed);
  const ir::Graph& plain = GraphAccess::of(graph);
  const ir::Tensors inputs = random_inputs(plain, seed);
  const ir::Tensors expected = ir::interpret(plain, inputs);
  CompileOptions options = device.options;
  options.memory_budget = seed % 2 == 0 ? 1 : 0;
  options.chunks = static_cast<std::int64_t>(seed % 5);
  const CompiledProgram compiled = compile(graph, options);
  const ir::Graph chunked = ir::parse(compiled.text()).graph;
  EXPECT_LT(difference(ir::interpret(chunked, inputs), expected), 1e-11) << compiled.text();
  EXPECT_LT(difference(device.run(compiled, inputs, 1, {}), expected), 1e-11) << compiled.text();
  const ir::Tensors before = random_sums(compiled, seed);
  options.added = names_of(before);
  EXPECT_LT(
      difference(device.run(compile(graph, options), inputs, 1, before), sum(expected, before)),
      1e-11);
  if (device.options.device.kind != DeviceKind::cpu) return;
  constexpr std::size_t kPointers = 1024;  // to the buffers of loops
  EXPECT_LE(compiled.arena_bytes(), compiled.unchunked_arena_bytes() + kPointers);
}

}  // namespace logitless::test

// The rotary embedding of graph.h: against its definition in double, its gradient, and its memory.
#include <gtest/gtest.h>

#include <cmath>

#include "compiler/graph_access.h"
#include "compiler/run.h"
#include "logitless/error.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kBatch = 2, kLength = 5, kHeads = 3, kSize = 8, kHalf = kSize / 2;

// Returns y and, with a cotangent g, the gradient d of x.
Graph rotation(DType dtype) {
  Graph graph("rotation");
  const Shape shape = {kBatch, kLength, kHeads, kSize};
  const Value x = graph.parameter("x", dtype, shape);
  const Value cos = graph.parameter("cos", DType::f32, {kLength, kHalf});
  const Value sin = graph.parameter("sin", DType::f32, {kLength, kHalf});
  const Value g = graph.parameter("g", dtype, shape);
  const Value y = rotate(x, cos, sin, 1);
  graph.result("y", y);
  graph.result("d", graph.gradients({y}, {x}, {g})[0]);
  return graph;
}

// Angles differ for each position and pair.
ir::Tensors inputs(const Graph& graph) {
  ir::Tensors tensors = random_inputs(GraphAccess::of(graph), 11);
  for (std::int64_t i = 0; i < kLength * kHalf; ++i) {
    const double angle = 0.37 * static_cast<double>(i) + 0.2;
    const auto at = static_cast<std::size_t>(i);
    tensors.at("cos").data[at] = static_cast<double>(static_cast<float>(std::cos(angle)));
    tensors.at("sin").data[at] = static_cast<double>(static_cast<float>(std::sin(angle)));
  }
  return tensors;
}

// Rotates the pairs (i, i + kHalf) of `name` by the angle times `direction`.
std::vector<double> turned(const ir::Tensors& in, const std::string& name, double direction) {
  const std::vector<double>& x = in.at(name).data;
  std::vector<double> y(x.size());
  for (std::size_t row = 0; row < x.size() / kSize; ++row) {
    const std::size_t position = row / kHeads % kLength;
    for (std::size_t i = 0; i < kHalf; ++i) {
      const double c = in.at("cos").data[position * kHalf + i];
      const double s = direction * in.at("sin").data[position * kHalf + i];
      const double a = x[row * kSize + i], b = x[row * kSize + i + kHalf];
      y[row * kSize + i] = a * c - b * s;
      y[row * kSize + i + kHalf] = b * c + a * s;
    }
  }
  return y;
}

TEST(RotateTest, IsItsDefinitionAndTurnsGradientsBack) {
  const Graph graph = rotation(DType::f32);
  const ir::Tensors in = inputs(graph);
  const ir::Tensors out = ir::interpret(GraphAccess::of(graph), in);
  const std::vector<double> y = turned(in, "x", 1.0), d = turned(in, "g", -1.0);
  for (std::size_t i = 0; i < y.size(); ++i) {
    EXPECT_NEAR(out.at("y").data[i], y[i], 1e-14) << i;
    EXPECT_NEAR(out.at("d").data[i], d[i], 1e-14) << i;
  }
}

TEST(RotateTest, RunsAsItIsInterpreted) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(name_of(dtype));
    const Graph graph = rotation(dtype);
    const ir::Tensors in = inputs(graph);
    const double tolerance = dtype == DType::f32 ? 1e-6 : dtype == DType::bf16 ? 4.1e-3 : 5.1e-4;
    EXPECT_LT(difference(execute(compile(graph), in), ir::interpret(GraphAccess::of(graph), in)),
              tolerance);
  }
}

// One pass over x and one over its gradient: neither halves nor swapped pairs get memory.
TEST(RotateTest, KeepsNothingOfTheSizeOfItsOperand) {
  Graph graph("rotation");
  const Shape shape = {2, 64, 32, 64};
  const Value x = graph.parameter("x", DType::bf16, shape);
  const Value cos = graph.parameter("cos", DType::f32, {64, 32});
  const Value sin = graph.parameter("sin", DType::f32, {64, 32});
  // An elementwise operand is computed backwards, too.
  const Value y = rotate(x * 0.5, cos, sin, 1);
  graph.result("y", y);
  const Value g = graph.parameter("g", DType::bf16, shape);
  graph.result("d", graph.gradients({y}, {x}, {g})[0]);
  const std::size_t tables = 2u * 64u * 32u * sizeof(float);
  const std::size_t operand = 2u * 64u * 32u * 64u * 2u;
  CompileOptions options;
  options.threads = 1;
  EXPECT_LE(compile(graph, options).arena_bytes(), 4 * tables);
  EXPECT_LT(4 * tables, operand / 4);
}

// A value that is read forwards and backwards takes two registers: loops are cut before they run
// out.
TEST(RotateTest, EveryDirectionTakesRegisters) {
  Graph graph("directions");
  Value sum;
  for (int i = 0; i < 5; ++i) {
    const Value x = graph.parameter("x" + std::to_string(i), DType::f32, {3, 4, 8});
    sum = i == 0 ? x : sum + x * x;
  }
  Value y = sum;
  for (int backwards = 1; backwards < 8; ++backwards) {
    Value turned = sum;
    for (int d = 0; d < 3; ++d) {
      if ((backwards >> d & 1) != 0) turned = flip(turned, d);
    }
    y = y * 0.5 + turned;
  }
  graph.result("y", y);
  const ir::Tensors in = random_inputs(GraphAccess::of(graph), 2);
  EXPECT_LT(difference(execute(compile(graph), in), ir::interpret(GraphAccess::of(graph), in)),
            1e-6);
}

TEST(RotateTest, RefusesByName) {
  Graph graph("bad");
  const Value x = graph.parameter("x", DType::f32, {4, 3, 6});
  const Value odd = graph.parameter("odd", DType::f32, {4, 3, 5});
  const Value table = graph.parameter("table", DType::f32, {4, 3});
  const Value wide = graph.parameter("wide", DType::f64, {4, 3});
  const auto refused = [](auto act, const std::string& text) {
    try {
      act();
      FAIL() << "nothing was thrown; expected: " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused([&] { rotate(x, table, table, 2); }, "rotate: axis is 2 of [4, 3, 6]");
  refused([&] { rotate(odd, table, table, 0); }, "[4, 3, 5] is no even number");
  refused([&] { rotate(x, table, table, 1); }, "are [4, 3] and [4, 3], expected [3, 3]");
  refused([&] { rotate(x, wide, wide, 0); }, "cos and sin are f32");
  EXPECT_EQ(rotate(x, table, table, 0).shape(), x.shape());
}

}  // namespace
}  // namespace logitless::test

// Infinities and NaN in reductions, along rows and columns, in one block and across several,
// against the interpreter.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "compiler/graph_access.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Returns rows of numbers near `level` with special values at two positions, in every order.
std::vector<double> rows_of(std::int64_t columns, double level, std::int64_t* rows) {
  constexpr double kSpecial[] = {kNan, kInf, -kInf, 1.0};
  std::vector<double> x;
  *rows = 0;
  const double step = std::abs(level) < 100.0 ? 0.25 : 0.0;  // representable in every dtype
  const auto add = [&](double fill, std::int64_t i, double a, std::int64_t j, double b) {
    for (std::int64_t k = 0; k < columns; ++k)
      x.push_back(k == i ? a : k == j ? b : fill == 0.0 ? level + step * (k % 3) : fill);
    ++*rows;
  };
  const std::int64_t places[] = {0, columns / 2, columns - 1};
  for (const double a : kSpecial) {
    for (const double b : kSpecial) {
      for (const std::int64_t i : places) {
        for (const std::int64_t j : places) add(0.0, i, a, j, b);
      }
      add(-kInf, 0, a, columns - 1, b);
      add(kInf, 0, a, columns - 1, b);
    }
  }
  return x;
}

void expect_same(const ir::Tensor& got, const ir::Tensor& want, double tolerance) {
  ASSERT_EQ(got.shape, want.shape);
  int wrong = 0;
  for (std::size_t i = 0; i < want.data.size() && wrong < 5; ++i) {
    const double a = got.data[i], b = want.data[i];
    const bool same = std::isnan(b)   ? std::isnan(a)
                      : std::isinf(b) ? a == b
                                      : std::abs(a - b) <= tolerance * (1.0 + std::abs(b));
    EXPECT_TRUE(same) << "row " << i << ": " << a << ", expected " << b;
    wrong += !same;
  }
}

struct Case {
  std::string dtype;
  double level, tolerance;
};

void check(const Case& c, std::int64_t columns, bool by_columns, std::int64_t chunks) {
  std::int64_t rows = 0;
  std::vector<double> x = rows_of(columns, c.level, &rows);
  std::vector<std::int64_t> shape = {rows, columns};
  if (by_columns) {
    std::vector<double> turned(x.size());
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t k = 0; k < columns; ++k)
        turned[static_cast<std::size_t>(k * rows + i)] =
            x[static_cast<std::size_t>(i * columns + k)];
    }
    x = std::move(turned);
    shape = {columns, rows};
  }
  const std::string dim = by_columns ? "0" : "1";
  const std::string text =
      "graph g(%x: " + c.dtype + "[" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) +
      "]) {\n  %y = neg %x\n  %z = neg %y\n" + "  %sum = reduce_sum %z dims(" + dim + ")\n" +  //
      "  %max = reduce_max %z dims(" + dim + ")\n" + "  %lse = reduce_lse %z dims(" + dim + ")\n" +
      "  %argmax = argmax %z dims(" + dim + ")\n" +
      "  return sum: %sum, max: %max, lse: %lse, argmax: %argmax\n}\n";
  SCOPED_TRACE(text);
  const Graph graph = Graph::parse(text, "test");
  const ir::Tensors inputs = {{"x", ir::Tensor{shape, x}}};
  CompileOptions options;
  options.chunk = chunks > 0;
  options.chunks = chunks;
  options.threads = 2;
  const ir::Tensors want = ir::interpret(GraphAccess::of(graph), inputs);
  const ir::Tensors got = execute(compile(graph, options), inputs);
  for (const auto& [name, tensor] : want) {
    SCOPED_TRACE(name);
    expect_same(got.at(name), tensor, c.tolerance);
  }
}

class SpecialValues : public testing::TestWithParam<Case> {};

TEST_P(SpecialValues, OfReductions) {
  for (const std::int64_t columns : {3, 40, 700, 1300}) {
    for (const bool by_columns : {false, true}) {
      for (const std::int64_t chunks : {0, 3}) {
        SCOPED_TRACE(chunks);
        check(GetParam(), columns, by_columns, chunks);
      }
    }
  }
}

// Numbers whose exponentials overflow and, in f32, whose products with log2(e) overflow.
INSTANTIATE_TEST_SUITE_P(All, SpecialValues,
                         testing::Values(Case{"f64", 0.5, 1e-12}, Case{"f64", 1e5, 1e-12},
                                         Case{"f64", -1e300, 1e-12}, Case{"f32", 0.5, 2e-6},
                                         Case{"f32", 2000.0, 2e-6}, Case{"f32", -2000.0, 2e-6},
                                         Case{"f32", 1e10, 2e-6}, Case{"f32", -1e10, 2e-6},
                                         Case{"bf16", 0.5, 0x1p-7}, Case{"bf16", 2048.0, 0x1p-7},
                                         Case{"f16", 0.5, 0x1p-9}, Case{"f16", -16.0, 0x1p-9}),
                         [](const auto& made) {
                           return made.param.dtype + "_" + std::to_string(made.index);
                         });

// Neighbouring integers that f32 rounds to one number compare as different. They are compared with
// each other, with a constant and with a computed one.
TEST(WholeNumbers, AreToldApart) {
  const std::vector<double> x = {16777216,   16777217,   2147483646,
                                 2147483647, 8589934592, 8589934593};
  for (const std::string dtype : {"i32", "i64"}) {
    const std::size_t count = dtype == "i32" ? 4 : 6;
    const std::string row = std::to_string(count), type = dtype + "[" + row + "]";
    const std::string square = dtype + "[" + row + ", " + row + "]";
    const Graph graph = Graph::parse(
        "graph g(%x: " + type + ", %y: " + type + ") {\n  %a = broadcast %x dims(0) : " + square +
            "\n  %b = broadcast %y dims(1) : " + square +
            "\n  %eq = eq %a, %b\n  %lt = lt %a, %b\n  %c = constant value(16777217) : " + square +
            "\n  %ge = ge %a, %c\n  %d = sub %a, %b\n  %zero = constant value(0) : " + square +
            "\n  %ne = ne %d, %zero\n  %one = constant value(1.0) : f32[" + row + ", " + row +
            "]\n  %two = add %one, %one\n  %f = select %eq, %two, %one\n" +
            "  return eq: %eq, lt: %lt, ge: %ge, ne: %ne, f: %f\n}\n",
        "test");
    const ir::Tensor given{{static_cast<std::int64_t>(count)},
                           {x.begin(), x.begin() + static_cast<std::ptrdiff_t>(count)}};
    const ir::Tensors inputs = {{"x", given}, {"y", given}};
    const ir::Tensors want = ir::interpret(GraphAccess::of(graph), inputs);
    const ir::Tensors got = execute(compile(graph, {}), inputs);
    for (const auto& [name, tensor] : want) {
      SCOPED_TRACE(dtype + " " + name);
      expect_same(got.at(name), tensor, 0.0);
    }
  }
}

}  // namespace
}  // namespace logitless::test

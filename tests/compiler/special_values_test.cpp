// Infinities and NaN in reductions, along rows and columns, in one block and across several,
// against the interpreter.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <cmath>
#include <limits>
#include <map>
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

// Parts of a row that a loop merges: inf in one of them, in all, and in none.
TEST(SpecialValuesOfLoops, LogSumExpsAreMerged) {
  const Graph graph = Graph::parse(
      "graph g(%x: f32[4, 6]) {\n"
      "  %s = loop c extent(6) chunk(2) (%first, %a = slice %x axis(1) factor(1)) {\n"
      "    %l = reduce_lse %a dims(1)\n    return s: lse %l\n  }\n  return s: %s\n}\n",
      "test");
  const ir::Tensors inputs = {
      {"x", {{4, 6}, {kInf,  1,     2,     3,     4,     5,     1, 2,    kInf, kInf, -kInf, kInf,
                      -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, 1, kNan, 2,    kInf, 3,     4}}}};
  const ir::Tensors want = ir::interpret(GraphAccess::of(graph), inputs);
  CompileOptions options;
  options.chunk = false;
  expect_same(execute(compile(graph, options), inputs).at("s"), want.at("s"), 0.0);
  EXPECT_EQ(want.at("s").data[0], kInf);
}

// Results of `statements`, which read %x and %y of a dtype and a row of f32, %f.
void check_integers(const std::string& dtype, const std::vector<double>& x,
                    const std::vector<double>& y, const std::string& statements,
                    const std::vector<std::string>& results) {
  const std::string row = "[" + std::to_string(x.size()) + "]";
  std::string text = "graph g(%x: " + dtype + row + ", %y: " + dtype + row + ", %f: f32" + row +
                     ") {\n" + statements + "  return ";
  for (const std::string& name : results)
    text += (name == results[0] ? "" : ", ") + name + ": %" + name;
  SCOPED_TRACE(text);
  const Graph graph = Graph::parse(text + "\n}\n", "test");
  const auto size = static_cast<std::int64_t>(x.size());
  const ir::Tensors inputs = {
      {"x", {{size}, x}}, {"y", {{size}, y}}, {"f", {{size}, std::vector<double>(x.size(), 1.5)}}};
  const ir::Tensors want = ir::interpret(GraphAccess::of(graph), inputs);
  const ir::Tensors got = execute(compile(graph, {}), inputs);
  std::map<std::string, DType> types;
  for (const ir::Output& o : GraphAccess::of(graph).outputs())
    types[o.name] = GraphAccess::of(graph).type(o.value).dtype;
  for (const auto& [name, tensor] : want) {
    SCOPED_TRACE(name);
    // The interpreter computes in doubles and does not round f32.
    expect_same(got.at(name), tensor, types.at(name) == DType::f32 ? 0x1p-23 : 0.0);
  }
}

std::string arithmetic_of(const std::string& dtype, std::size_t count) {
  const std::string type = dtype + "[" + std::to_string(count) + "]";
  return "  %add = add %x, %y\n  %sub = sub %x, %y\n  %mul = mul %x, %y\n  %neg = neg %x\n"
         "  %abs = abs %x\n  %sign = sign %x\n  %most = max %add, %mul\n  %lt = lt %add, %x\n"
         "  %mixed = select %lt, %f, %f\n  %sum = reduce_sum %x dims(0)\n"
         "  %top = reduce_max %mul dims(0)\n  %at = argmax %sub dims(0)\n"
         "  %c = constant value(65537) : " +
         type +
         "\n  %long = mul %c, %x\n"
         "  %longer = mul %long, %c\n  %real = cast %longer : f32[" +
         std::to_string(count) +
         "]\n"
         "  %one = constant value(1.0) : f32[" +
         std::to_string(count) +
         "]\n"
         "  %two = add %one, %one\n  %eq = eq %longer, %y\n  %chosen = select %eq, %one, %two\n"
         "  %scaled = mul %chosen, %f\n";
}

TEST(WholeNumbers, Wrap) {
  const std::vector<std::string> results = {"add",  "sub",    "mul",   "neg",   "abs", "sign",
                                            "most", "lt",     "mixed", "sum",   "top", "at",
                                            "long", "longer", "real",  "scaled"};
  const double top = 2147483647, bottom = -2147483648.0;
  const std::vector<double> x = {top, bottom, top, bottom, 65536, -7, 16777217, 0},
                            y = {1, -1, top, bottom, 65536, 16777217, 16777216, 65537};
  check_integers("i32", x, y, arithmetic_of("i32", x.size()), results);
  // Powers of 2, and their sums, that a double has beyond 2^53.
  const std::vector<double> far = {0x1p62, -0x1p63, 0x1p32, 0x1p53, 3 * 0x1p60, -0x1p62},
                            by = {4, -1, 0x1p32, 0x1p10, 16, -0x1p62};
  check_integers("i64", far, by, arithmetic_of("i64", far.size()), results);
}

// A float that no integer of the dtype is becomes the least one, wherever it is read.
TEST(WholeNumbers, OfFloatsThatFitIntoNone) {
  for (const double most : {0x1p31, 0x1p63}) {
    const std::string dtype = most == 0x1p31 ? "i32" : "i64";
    const Graph graph = Graph::parse("graph g(%f: f32[8]) {\n  %w = cast %f : " + dtype +
                                         "[8]\n  %r = cast %w : f32[8]\n  %n = neg %r\n"
                                         "  return w: %w, n: %n\n}\n",
                                     "test");
    const std::vector<double> x = {kNan, kInf, -kInf, most, -most, 1e20, -1.9, 0x1.fffffep30};
    const ir::Tensors got = execute(compile(graph, {}), {{"f", {{8}, x}}});
    std::vector<double> want(8, -most);
    want[6] = -1;
    want[7] = 0x1.fffffep30;
    EXPECT_EQ(got.at("w").data, want);
    EXPECT_EQ(ir::interpret(GraphAccess::of(graph), {{"f", {{8}, x}}}).at("w").data, want);
    for (double& v : want) v = -v;
    EXPECT_EQ(got.at("n").data, want);
  }
}

// Integers of 64 bits are sorted by 32 bits where those of a row are near each other.
TEST(WholeNumbers, AreSortedNearAndFar) {
  std::vector<double> x;
  for (int i = 0; i < 60; ++i) x.push_back(0x1p50 - (i * 37) % 23);           // near, some equal
  for (int i = 0; i < 60; ++i) x.push_back((i * 41) % 60 * 0x1p30 - 0x1p40);  // far
  for (int i = 0; i < 60; ++i)
    x.push_back(i % 7 == 0 ? 0xFFFFFFFFp0 - 5 : -5);  // as near as may be
  const ir::Tensors inputs = {{"x", ir::Tensor{{3, 60}, x}}};
  for (const std::string count : {"60", "7"}) {
    for (const std::string descending : {"0", "1"}) {
      const Graph graph =
          Graph::parse("graph g(%x: i64[3, 60]) {\n  %v, %i = sort %x axis(1) count(" + count +
                           ") descending(" + descending + ")\n  return v: %v, i: %i\n}\n",
                       "test");
      const ir::Tensors want = ir::interpret(GraphAccess::of(graph), inputs);
      const ir::Tensors got = execute(compile(graph, {}), inputs);
      for (const auto& [name, tensor] : want) expect_same(got.at(name), tensor, 0.0);
    }
  }
}

// The first of the greatest elements, which a NaN is, before and after the first part of a row.
TEST(ArgMax, IsTheFirstOfTheGreatest) {
  constexpr std::int64_t kSize = 1300;
  const std::vector<std::vector<std::pair<int, double>>> rows = {
      {{3, 2}, {700, 2}},         {{700, 2}, {1299, 2}}, {{600, kNan}, {601, kInf}, {1290, kNan}},
      {{511, kInf}, {512, kInf}}, {{0, kNan}},           {{1299, 1}}};
  std::vector<double> x, want;
  for (const auto& row : rows) {
    std::vector<double> made(static_cast<std::size_t>(kSize), -kInf);
    for (const auto& [at, number] : row) made[static_cast<std::size_t>(at)] = number;
    x.insert(x.end(), made.begin(), made.end());
    want.push_back(row.front().first);
  }
  x.insert(x.end(), static_cast<std::size_t>(kSize), -kInf);
  want.push_back(0);
  const std::string shape = "[" + std::to_string(want.size()) + ", " + std::to_string(kSize) + "]";
  for (const std::string dtype : {"f32", "bf16", "f16", "f64"}) {
    const Graph graph = Graph::parse(
        "graph g(%x: " + dtype + shape + ") {\n  %i = argmax %x dims(1)\n  return i: %i\n}\n",
        "test");
    const ir::Tensors inputs = {
        {"x", ir::Tensor{{static_cast<std::int64_t>(want.size()), kSize}, x}}};
    EXPECT_EQ(execute(compile(graph, {}), inputs).at("i").data, want) << dtype;
  }
}

// The maximum of no integers is the least of them, also where they are computed.
TEST(WholeNumbers, TheMaximumOfNoneIsTheLeast) {
  for (const double most : {0x1p31, 0x1p63}) {
    const std::string dtype = most == 0x1p31 ? "i32" : "i64";
    const Graph graph = Graph::parse("graph g(%x: " + dtype + "[3, 0], %y: " + dtype +
                                         "[0, 3]) {\n  %s = add %x, %x\n  %t = mul %y, %y\n"
                                         "  %rows = reduce_max %s dims(1)\n"
                                         "  %columns = reduce_max %t dims(0)\n"
                                         "  return rows: %rows, columns: %columns\n}\n",
                                     "test");
    const ir::Tensors got = execute(compile(graph, {}), {{"x", {{3, 0}, {}}}, {"y", {{0, 3}, {}}}});
    for (const char* name : {"rows", "columns"})
      EXPECT_EQ(got.at(name).data, std::vector<double>(3, -most)) << name;
  }
}

TEST(WholeNumbers, AreCastAsTheirDtypeHasThem) {
  check_integers("i64", {0x1p32, 0x1p31, -0x1p31 - 1, 5}, {0, 0, 0, 0},
                 "  %narrow = cast %x : i32[4]\n  %again = cast %narrow : i64[4]\n"
                 "  %sum = add %again, %y\n  %number = cast %narrow : f32[4]\n"
                 "  %plus = add %number, %f\n",
                 {"narrow", "sum", "plus"});
}

}  // namespace
}  // namespace logitless::test

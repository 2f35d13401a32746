// Operations with an order: running sums, sorting, indexed writes, and counter-based random
// numbers.
#include <gtest/gtest.h>
#include <logitless/error.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>

#include "compiler/analysis/region.h"
#include "compiler/graph_access.h"
#include "compiler/ir/function.h"
#include "compiler/ir/text.h"
#include "compiler/passes/form_loops.h"
#include "compiler/passes/passes.h"
#include "compiler/plan/lower.h"
#include "compiler/run.h"
#include "compiler/target/cuda.h"
#include "core/element.h"

namespace logitless::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Returns the executor's results, which must equal the interpreter's to the last bit.
ir::Tensors run(const std::string& text, const ir::Tensors& inputs) {
  const Graph graph = Graph::parse(text);
  ir::Tensors made = execute(compile(graph), inputs);
  for (const auto& [name, expected] : ir::interpret(GraphAccess::of(graph), inputs)) {
    const ir::Tensor& found = made.at(name);
    EXPECT_EQ(found.shape, expected.shape);
    for (std::size_t i = 0; i < expected.data.size(); ++i) {
      const double x = found.data[i], y = expected.data[i];
      EXPECT_TRUE(x == y || (std::isnan(x) && std::isnan(y))) << text << " " << name << " " << i;
    }
  }
  return made;
}
std::string sorting(const std::string& type, int count, bool descending) {
  return "graph g(%x: " + type + "[6]) { %v, %i = sort %x axis(0) count(" + std::to_string(count) +
         ") descending(" + (descending ? "1" : "0") + ") return v: %v, i: %i }";
}
using Numbers = std::vector<double>;

TEST(Sorting, KeepsEqualOnesInOrder) {
  const ir::Tensors x = {{"x", {{6}, {2, 1, 2, 0, 1, 2}}}};
  for (const std::string type : {"f32", "bf16", "f16", "f64", "i32", "i64"}) {
    SCOPED_TRACE(type);
    const ir::Tensors up = run(sorting(type, 6, false), x), down = run(sorting(type, 6, true), x);
    EXPECT_EQ(up.at("v").data, Numbers({0, 1, 1, 2, 2, 2}));
    EXPECT_EQ(up.at("i").data, Numbers({3, 1, 4, 0, 2, 5}));
    EXPECT_EQ(down.at("v").data, Numbers({2, 2, 2, 1, 1, 0}));
    EXPECT_EQ(down.at("i").data, Numbers({0, 2, 5, 1, 4, 3}));
    EXPECT_EQ(run(sorting(type, 2, true), x).at("i").data, Numbers({0, 2}));
    EXPECT_EQ(run(sorting(type, 1, false), x).at("i").data, Numbers({3}));
  }
}

TEST(Sorting, TakesANanForTheGreatest) {
  const ir::Tensors x = {{"x", {{6}, {1, kNan, kInf, -kInf, kNan, 0}}}};
  for (const char* type : {"f32", "f64"}) {
    EXPECT_EQ(run(sorting(type, 6, false), x).at("i").data, Numbers({3, 5, 0, 2, 1, 4}));
    EXPECT_EQ(run(sorting(type, 4, true), x).at("i").data, Numbers({1, 4, 2, 0}));
  }
}

// Rows as the library's sort cuts them by digits: of one magnitude and of all, with ties, in order.
TEST(Sorting, OrdersLongRowsOfAnyNumbers) {
  std::mt19937 rng(3);
  std::normal_distribution<double> normal;
  constexpr std::int64_t kSize = 600;
  const std::function<double(std::int64_t)> kinds[] = {
      [&](std::int64_t) { return normal(rng); },
      [&](std::int64_t) { return std::ldexp(normal(rng), static_cast<int>(rng() % 200) - 100); },
      [&](std::int64_t) { return static_cast<double>(rng() % 5) - 2.0; },
      [](std::int64_t i) { return static_cast<double>(i) * 0.5; },
      [](std::int64_t i) { return static_cast<double>(-i); },
      [](std::int64_t) { return -kInf; },
      [&](std::int64_t i) {
        return i % 7 == 0 ? kNan : i % 7 == 1 ? -0.0 : i % 7 == 2 ? 0.0 : normal(rng);
      },
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i32}) {
    const std::string type(name_of(dtype));
    for (const auto& kind : kinds) {
      ir::Tensor x{{kSize, 2}, Numbers(2 * kSize)};
      for (std::size_t i = 0; i < x.data.size(); ++i) {
        const double v = kind(static_cast<std::int64_t>(i / 2));
        if (dtype == DType::i32) {
          x.data[i] = std::abs(v) < 1e6 ? std::trunc(1e3 * v) : 7.0;
        } else {  // a number of the dtype
          std::array<std::byte, 8> bytes{};
          store_element(bytes.data(), dtype, 0, v);
          x.data[i] = load_element(bytes.data(), dtype, 0);
        }
      }
      const ir::Tensor across{{2, kSize}, x.data};
      for (const std::int64_t kept : {kSize, kSize / 3, std::int64_t{40}, std::int64_t{1}}) {
        for (const char* descending : {"0", "1"}) {
          const auto text = [&](const char* shape, const char* axis) {
            return "graph g(%x: " + type + shape + ") { %v, %i = sort %x axis(" + axis +
                   ") count(" + std::to_string(kept) + ") descending(" + descending +
                   ") return v: %v, i: %i }";
          };
          run(text("[600, 2]", "0"), {{"x", x}});
          run(text("[2, 600]", "1"), {{"x", across}});
        }
      }
    }
  }
}

TEST(Sorting, RefusesWhatIsNotThere) {
  const auto refused = [](const std::string& text) -> std::string {
    try {
      ir::parse(text);
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_NE(refused(sorting("f32", 7, true)).find("sort: 7 of 6 elements along dimension 0"),
            std::string::npos);
  EXPECT_NE(refused(sorting("i8", 6, true)).find("cast it first"), std::string::npos);
  EXPECT_NE(refused("graph g(%x: f32[2], %i: i64[3]) { %y = put %i, %x axis(0) size(4) return y: "
                    "%y }")
                .find("expected equal shapes"),
            std::string::npos);
}

TEST(RunningSums, OfWholeNumbersAreExact) {
  constexpr double kFar = 4503599627370496.0;  // sums of doubles are exact below twice this
  const ir::Tensors made =
      run("graph g(%x: i64[4]) { %a = cumsum %x axis(0) reverse(0) %b = cumsum %x axis(0) "
          "reverse(1) return a: %a, b: %b }",
          {{"x", {{4}, {kFar, 1, -kFar, 5}}}});
  EXPECT_EQ(made.at("a").data, Numbers({kFar, kFar + 1, 1, 6}));
  EXPECT_EQ(made.at("b").data, Numbers({6, 6 - kFar, 5 - kFar, 5}));
}

TEST(RunningSums, OfExponentialsNeverOverflow) {
  const Graph graph =
      Graph::parse("graph g(%x: f32[5]) { %a = cumlse %x axis(0) reverse(0) return a: %a }");
  const ir::Tensors made =
      execute(compile(graph), {{"x", {{5}, {-kInf, 1000.0, 1000.0, -kInf, kNan}}}});
  const Numbers& a = made.at("a").data;
  EXPECT_EQ(a[0], -kInf);
  EXPECT_EQ(a[1], 1000.0);
  EXPECT_NEAR(a[2], 1000.0 + std::log(2.0), 1e-4);
  EXPECT_EQ(a[3], a[2]);
  EXPECT_TRUE(std::isnan(a[4]));
}

TEST(RunningProducts, KeepSignsZerosAndNaNs) {
  const ir::Tensors x = {{"x", {{6}, {-2, 0.5, -0.0, -3, kNan, 1}}}};
  for (const std::string type : {"f32", "bf16", "f64"}) {
    const std::string text = "graph g(%x: " + type +
                             "[6]) { %y = cumprod %x axis(0) reverse(0) %m = cummax %x axis(0) "
                             "reverse(0) %b = cummax %x axis(0) reverse(1) return y: %y, m: %m, b: "
                             "%b }";
    const ir::Tensors made = run(text, x);
    const Numbers& y = made.at("y").data;
    EXPECT_EQ(Numbers(y.begin(), y.begin() + 4), Numbers({-2, -1, 0, -0.0}));
    EXPECT_FALSE(std::signbit(y[2]));
    EXPECT_TRUE(std::signbit(y[3]) && std::isnan(y[4]) && std::isnan(y[5]));
    const Numbers &m = made.at("m").data, &b = made.at("b").data;
    EXPECT_EQ(Numbers(m.begin(), m.begin() + 4), Numbers({-2, 0.5, 0.5, 0.5}));
    EXPECT_TRUE(std::isnan(m[4]) && std::isnan(m[5]) && std::isnan(b[0]) && std::isnan(b[4]));
    EXPECT_EQ(b[5], 1.0);
  }
  const ir::Tensors whole =
      run("graph g(%x: i64[3]) { %y = cummax %x axis(0) reverse(0) return y: %y }",
          {{"x", {{3}, {-5, -7, -4}}}});
  EXPECT_EQ(whole.at("y").data, Numbers({-5, -5, -4}));
}

// The gradient of a product is that of the others; a quotient would be NaN beside a zero.
TEST(RunningProducts, HaveGradientsBesideZeros) {
  const std::string begin = "graph g(%x: f64[4], %g: f64[4]) { ", end = " differentiate y";
  const ir::Tensors given = {{"x", {{4}, {2, 0, 3, 0}}}, {"g", {{4}, {1, 10, 100, 1000}}}};
  const auto gradient = [&](const std::string& text) {
    const ir::ParsedGraph parsed = ir::parse(text);
    const ir::Graph graph = ir::differentiate(parsed.graph, parsed.gradients);
    return ir::interpret(graph, given).at("d_x").data;
  };
  EXPECT_EQ(
      gradient(begin + "%y = cumprod %x axis(0) reverse(0) return y: %y" + end + " by %g wrt %x }"),
      Numbers({1, 620, 0, 0}));
  EXPECT_EQ(gradient(begin + "%y = reduce_product %x dims(0) return y: %y" + end + " wrt %x }"),
            Numbers({0, 0, 0, 0}));
  EXPECT_EQ(gradient(begin +
                     "%s = slice %x begin(0) end(3) %y = reduce_product %s dims(0) return "
                     "y: %y" +
                     end + " wrt %x }"),
            Numbers({0, 6, 0, 0}));
  // A running maximum gives its gradient to the last element that is equal to it.
  EXPECT_EQ(
      gradient(begin + "%y = cummax %x axis(0) reverse(0) return y: %y" + end + " by %g wrt %x }"),
      Numbers({11, 0, 1100, 0}));
}

TEST(Put, AddsWhatMeetsAndDropsWhatIsOutside) {
  const ir::Tensors made =
      run("graph g(%i: i32[2, 4], %x: f32[2, 4]) { %y = put %i, %x axis(1) size(3) return y: %y }",
          {{"i", {{2, 4}, {0, 2, 0, -1, 3, 1, 1, 1}}}, {"x", {{2, 4}, {1, 2, 3, 4, 5, 6, 7, 8}}}});
  EXPECT_EQ(made.at("y").data, Numbers({4, 0, 2, 0, 21, 0}));
}

// Cuts along the axis that is written, where indices count from the chunk.
TEST(Put, IsTheSameInChunksOfWhatItWrites) {
  const ir::Graph graph = ir::parse(
                              "graph g(%i: i64[3, 4], %x: f64[3, 4]) { %y = put %i, %x "
                              "axis(1) size(7) %n = neg %y return n: %n }")
                              .graph;
  const ir::Tensors inputs = random_inputs(graph, 2);
  for (const int dim : {0, 1}) {
    const ir::Region region = ir::grow_region(graph, graph.outputs()[0].value, {dim, 1, 1});
    ASSERT_EQ(region.nodes.size(), 2u);
    EXPECT_EQ(difference(ir::interpret(ir::form_loops(graph, region, 2), inputs),
                         ir::interpret(graph, inputs)),
              0.0);
  }
}

// Known answers of Random123 (Salmon et al.): the upper 23 bits of the exclusive or of both
// outputs.
TEST(RandomNumbers, AreThoseOfThreefry) {
  const auto number = [](double key0, double key1, double counter) {
    return std::ldexp(ir::evaluate(ir::Function::random, key0, key1, counter), 23);
  };
  EXPECT_EQ(number(0, 0, 0), (0x6b200159u ^ 0x99ba4efeu) >> 9);
  EXPECT_EQ(number(-1, -1, -1), (0x1cb996fcu ^ 0xbb002be7u) >> 9);
  EXPECT_EQ(number(0xffffffffu, 0xffffffffu, -1), number(-1, -1, -1));
  // The upper 32 bits of a counter change the result; a double holds them beside the lower ones.
  EXPECT_NE(number(1, 2, 3), number(1, 2, 3 + 4294967296.0));
  EXPECT_NE(number(1, 2, 3), number(2, 1, 3));
}

// Known answers of Random123, philox4x32 with 10 rounds.
TEST(RandomNumbers, AreThoseOfPhilox) {
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(ir::philox(0, 0, {0, 0, 0, 0}),
            (Block{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(ir::philox(~0u, ~0u, {~0u, ~0u, ~0u, ~0u}),
            (Block{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(
      ir::philox(0xa4093822u, 0x299f31d0u, {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}),
      (Block{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

// Each entry has 16 bits of its own of a block that eight entries share, and 23 bits of another
// one. Of the 400 entries some begin a row of 32 that share blocks and some do not; the last have
// another key.
TEST(RandomNumbers, OfEntriesAreSlicesOfBlocks) {
  constexpr std::uint32_t kKey = 3735928559u;
  const auto key1_of = [](std::uint32_t i) { return i < 350 ? 12345u : 12346u; };
  const Graph graph = Graph::parse(
      "graph g(%k: i64[400], %l: i64[400], %e: i64[400]) { %u = uniform %k, %l, %e return u: %u }");
  ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 2);
  for (std::uint32_t i = 0; i < 400; ++i) {
    inputs.at("k").data[i] = kKey;
    inputs.at("l").data[i] = key1_of(i);
    inputs.at("e").data[i] = i + 21;
  }
  const ir::Tensors found = execute(compile(graph), inputs);
  for (std::uint32_t i = 0; i < 400; ++i) {
    const std::uint32_t v = i + 21, w = v / 8 % 4, h = v % 2, key1 = key1_of(i);
    const std::uint32_t block = v / 32 * 4 + v / 2 % 4;
    const std::uint32_t pair = ir::philox(kKey, key1, {block, 0, 0, 0})[w];
    const std::uint32_t more = ir::philox(kKey, key1, {block, 1 + w / 2, 0, 0})[w % 2 * 2 + h];
    const double n = (pair >> 16 * h & 0xFFFFu) * 0x1p23 + (more >> 9);
    const double number = static_cast<float>((n + 0.5) * 0x1p-39);
    EXPECT_EQ(found.at("u").data[i], number) << i;
    EXPECT_EQ(ir::evaluate(ir::Function::uniform, kKey, key1, v), number) << i;
  }
  EXPECT_EQ(ir::evaluate(ir::Function::uniform, -1, 4294967301.0, -7),
            ir::evaluate(ir::Function::uniform, 4294967295.0, 5, 4294967289.0));
}

// Random numbers do not depend on chunks and loops.
TEST(RandomNumbers, HaveTheSameBitsInChunks) {
  const Graph graph = Graph::parse(
      "graph g(%k: i64[7, 90], %x: f32[7, 90]) { %i = iota axis(0) : i64[7, 90] %j = "
      "iota axis(1) : i64[7, 90] %w = constant value(90) : i64[7, 90] %h = mul %i, %w %c "
      "= add %h, %j %r = random %k, %k, %c %h2 = constant value(0.5) : f32[7, 90] %m = "
      "lt %r, %h2 %z = constant value(0) : f32[7, 90] %y = select %m, %x, %z return r: "
      "%r, y: %y }");
  const ir::Graph& inner = GraphAccess::of(graph);
  ir::Tensors inputs = random_inputs(inner, 2);
  for (double& key : inputs.at("k").data) key = 3735928559.0;
  const ir::Tensors expected = ir::interpret(inner, inputs);
  double mean = 0.0;
  for (const double r : expected.at("r").data) {
    EXPECT_TRUE(r >= 0.0 && r < 1.0);
    mean += r / 630.0;
  }
  EXPECT_NEAR(mean, 0.5, 0.05);
  for (const int chunks : {0, 3}) {
    CompileOptions options;
    options.chunks = chunks;
    EXPECT_EQ(difference(execute(compile(graph, options), inputs), expected), 0.0);
  }
}

TEST(Order, HasKernelsOnAGpu) {
  const auto refused = [](const std::string& statement) -> std::string {
    try {
      ir::lower(
          ir::parse("graph g(%x: f32[4, 6], %i: i64[4, 6]) { " + statement + " return y: %y }")
              .graph,
          ir::CudaTarget(90));
    } catch (const Unsupported& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refused("%y = cumsum %x axis(1) reverse(0)"), "accepted");
  EXPECT_EQ(refused("%y = cumprod %x axis(1) reverse(0)"), "accepted");
  EXPECT_EQ(refused("%y = cummax %i axis(1) reverse(1)"), "accepted");
  EXPECT_EQ(refused("%y = recurrence %x, %x axis(1) reverse(0)"), "accepted");
  EXPECT_EQ(refused("%y, %k = sort %x axis(1) count(2) descending(0)"), "accepted");
  EXPECT_EQ(refused("%y = put %i, %i axis(1) size(3)"), "accepted");
  EXPECT_EQ(refused("%y = put %i, %x axis(1) size(3)"), "accepted");
  EXPECT_EQ(refused("%f = cast %x : i64[4, 6] %y = random %i, %i, %f"), "accepted");
}

}  // namespace
}  // namespace logitless::test

// Sums of pads become concats: the text of what is joined and what stays, and the bits of random
// sums.
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "compiler/ir/build.h"
#include "compiler/ir/interpreter.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "logitless/graph.h"

namespace logitless::test {
namespace {

void expect_joined(const std::string& before, const std::string& after) {
  const ir::Graph result = ir::join_pads(ir::parse(before).graph);
  ir::verify(result);
  EXPECT_EQ(ir::print(result), ir::print(ir::parse(after).graph));
}
void expect_left(const std::string& text) { expect_joined(text, text); }

// Returns a graph whose parts are matrix products, which contain no -0, and whose result is a sum.
std::string of_products(const std::string& body) {
  return "graph g(%x: f32[4, 3], %w: f32[3, 2], %v: f32[3, 5], %r: f32[4, 9]) { %a = dot %x, %w "
         "contract(1; 0) %b = dot %x, %v contract(1; 0) " +
         body + " return s: %s }";
}

TEST(JoinPads, OfThreeInAnyOrderOfAddition) {
  const std::string parameters =
      "graph g(%x: f32[4, 3], %w: f32[3, 2]) { %a = dot %x, %w "
      "contract(1; 0) ";
  const std::string after = parameters + "%s = concat %a, %a, %a axis(1) return s: %s }";
  const std::string pads =
      "%p = pad %a low(0, 0) high(0, 4) %q = pad %a low(0, 2) high(0, 2) %r = pad %a low(0, 4) "
      "high(0, 0) ";
  for (const char* sum : {"%t = add %p, %q %s = add %t, %r ", "%t = add %r, %q %s = add %p, %t ",
                          "%t = add %r, %p %s = add %t, %q "})
    expect_joined(parameters + pads + sum + "return s: %s }", after);
}

TEST(JoinPads, UnevenPartsAndHoles) {
  expect_joined(of_products("%p = pad %a low(0, 0) high(0, 7) %q = pad %b low(0, 4) high(0, 0) "
                            "%s = add %q, %p"),
                of_products("%2 = pad %a low(0, 0) high(0, 2) %s = concat %2, %b axis(1)"));
  expect_joined(of_products("%p = pad %a low(0, 1) high(0, 6) %q = pad %b low(0, 3) high(0, 1) "
                            "%s = add %p, %q"),
                of_products("%2 = pad %a low(0, 1) high(0, 0) %3 = pad %b low(0, 0) high(0, 1) "
                            "%s = concat %2, %3 axis(1)"));
}

TEST(JoinPads, BesideWhatElseIsAdded) {
  const std::string pads = "%p = pad %a low(0, 0) high(0, 7) %q = pad %b low(0, 2) high(0, 2) ";
  const std::string joined =
      of_products("%2 = pad %b low(0, 0) high(0, 2) %3 = concat %a, %2 axis(1) %s = add %r, %3");
  for (const char* sum : {"%t = add %r, %p %s = add %t, %q", "%t = add %p, %r %s = add %q, %t",
                          "%t = add %p, %q %s = add %t, %r"})
    expect_joined(of_products(pads + sum), joined);
  // Parts that are added to different values stay: another order would change bits.
  expect_left(of_products(pads + "%e = exp %r %t = add %r, %p %u = add %e, %q %s = add %t, %u"));
  // A single pad in a sum stays.
  expect_left(
      "graph g(%a: f32[4, 2], %r: f32[4, 9]) { %p = pad %a low(0, 0) high(0, 7) %s = add %r, %p "
      "return s: %s }");
}

// The gradients of halves that are taken by two splits.
TEST(JoinPads, OfConcatsWithZeros) {
  const std::string zeros =
      "%z = constant value(0) : f32[4, 2] %y = constant value(0) : f32[4, 5] ";
  expect_joined(of_products(zeros + "%p = concat %a, %y, %z axis(1) %q = concat %z, %b, %z axis(1) "
                                    "%s = add %q, %p"),
                of_products("%4 = pad %b low(0, 0) high(0, 2) %s = concat %a, %4 axis(1)"));
  expect_left(of_products("%z = constant value(0) : f32[4, 2] %s = concat %z, %b, %a axis(1)"));
  // Nothing is added to two parts, so -0 among them stays.
  expect_left(
      of_products("%z = constant value(0) : f32[4, 2] %p = concat %a, %z, %b axis(1) "
                  "%s = pad %p low(0, 1) high(0, 0)"));
  expect_left(
      of_products("%z = constant value(-0) : f32[4, 2] %p = concat %a, %a, %b axis(1) "
                  "%q = concat %z, %z, %b axis(1) %s = add %p, %q"));
}

TEST(JoinPads, SlicesOfSlices) {
  // Joins a part that is itself joined from two parts.
  expect_joined(of_products("%p = pad %a low(0, 0) high(0, 2) %q = pad %a low(0, 2) high(0, 0) "
                            "%t = add %p, %q %u = pad %t low(0, 0) high(0, 5) %o = pad %b low(0, "
                            "4) high(0, 0) %s = add %u, %o"),
                of_products("%s = concat %a, %a, %b axis(1)"));
  expect_joined(of_products("%p = pad %a low(0, 1) high(0, 2) %s = pad %p low(0, 3) high(0, 1)"),
                "graph g(%x: f32[4, 3], %w: f32[3, 2], %v: f32[3, 5], %r: f32[4, 9]) { %a = dot "
                "%x, %w contract(1; 0) %s = pad %a low(0, 4) high(0, 3) return s: %s }");
}

TEST(JoinPads, ThroughCasts) {
  const std::string parameters =
      "graph g(%x: bf16[4, 3], %w: bf16[3, 2], %v: bf16[3, 5]) { %a = "
      "dot %x, %w contract(1; 0) %b = dot %x, %v contract(1; 0) : "
      "f32[4, 5] ";
  expect_joined(parameters +
                    "%p = pad %a low(0, 0) high(0, 5) %c = cast %p : f32[4, 7] %q = pad "
                    "%b low(0, 2) high(0, 0) %s = add %c, %q return s: %s }",
                parameters + "%2 = cast %a : f32[4, 2] %s = concat %2, %b axis(1) return s: %s }");
}

TEST(JoinPads, LeavesWhatOverlapsOrIsReadTwice) {
  const std::string pads = "%p = pad %a low(0, 0) high(0, 7) %q = pad %b low(0, 1) high(0, 3) ";
  expect_left(of_products(pads + "%s = add %p, %q"));
  // Pads along different dimensions stay.
  expect_left(
      "graph g(%a: f32[4, 3], %b: f32[2, 5]) { %p = pad %a low(0, 2) high(0, 0) %q = pad %b low(2, "
      "0) high(0, 0) %s = add %p, %q return s: %s }");
  // A partial sum with two readers becomes one concat, and its readers read that.
  expect_joined(of_products("%p = pad %a low(0, 0) high(0, 7) %q = pad %b low(0, 2) high(0, 2) "
                            "%t = add %p, %q %o = pad %a low(0, 7) high(0, 0) %u = add %t, %o %s "
                            "= mul %t, %u"),
                of_products("%2 = pad %b low(0, 0) high(0, 2) %t = concat %a, %2 axis(1) %o = pad "
                            "%a low(0, 7) high(0, 0) %u = add %t, %o %s = mul %t, %u"));
}

TEST(JoinPads, OfAnySize) {
  const std::string parameters =
      "graph g(%x: f32[N, 3], %w: f32[3, K], %v: f32[3, M]) { %a = dot "
      "%x, %w contract(1; 0) %b = dot %x, %v contract(1; 0) ";
  expect_joined(parameters +
                    "%p = pad %a low(0, 0) high(0, M) %q = pad %b low(0, K) high(0, 0) %s "
                    "= add %p, %q return s: %s }",
                parameters + "%s = concat %a, %b axis(1) return s: %s }");
  // The sizes decide whether the parts overlap.
  expect_left(parameters +
              "%p = pad %a low(0, 0) high(0, 2 * M) %q = pad %b low(0, M) high(0, K) "
              "%s = add %p, %q return s: %s }");
}

TEST(JoinPads, InTheBodyOfALoop) {
  const auto loop = [](const std::string& sum) {
    return "graph g(%x: f32[8, 4], %w: f32[4, 2]) { %y = loop c extent(8) chunk(2) (%first, %a = "
           "slice %x axis(0) factor(1), %b = whole %w) { %d = dot %a, %b contract(1; 0) " +
           sum + " return r: stack %s axis(0) factor(1) } return y: %y }";
  };
  expect_joined(loop("%p = pad %d low(0, 0) high(0, 2) %q = pad %d low(0, 2) high(0, 0) %s = add "
                     "%p, %q"),
                loop("%s = concat %d, %d axis(1)"));
}

// -0 + 0 is 0. If the difference can be seen, a part that may be -0 is still added to 0.
TEST(JoinPads, NegativeZero) {
  const auto graph = [](const std::string& sum, const std::string& rest) {
    return "graph g(%x: f32[2], %w: f32[4, 3]) { %n = neg %x " + sum + rest + " }";
  };
  const std::string pads = "%p = pad %n low(0) high(2) %q = pad %x low(2) high(0) %s = add %p, %q ";
  const std::string plain = "%s = concat %n, %x axis(0) ";
  const std::string exact =
      "%1 = constant value(0) : f32[2] %2 = add %n, %1 %3 = constant "
      "value(0) : f32[2] %4 = add %x, %3 %s = concat %2, %4 axis(0) ";
  for (const std::string rest :
       {"return s: %s", "%d = div %s, %s return d: %d", "%t = tanh %s %r = rsqrt %t return r: %r"})
    expect_joined(graph(pads, rest), graph(exact, rest));
  for (const std::string rest :
       {"%d = dot %s, %w contract(0; 0) return d: %d", "%e = exp %s return e: %e",
        "%t = tanh %s %r = reduce_sum %t dims(0) return r: %r"})
    expect_joined(graph(pads, rest), graph(plain, rest));
}

// --- random sums, bit by bit

class RandomSum {
 public:
  explicit RandomSum(std::uint64_t seed) : rng_(seed) {}

  ir::Graph make() {
    const ir::Value sum = sum_of(4 + below(5), kColumns);
    g_.add_output("s", sum);
    g_.add_output("quotient",
                  ir::map(g_, ir::Function::div, {ir::constant(g_, 1.0, g_.type(sum)), sum}));
    return std::move(g_);
  }
  // Half are -0 and 0, and the others have sums that depend on their order.
  ir::Tensors inputs(const ir::Graph& graph) {
    ir::Tensors inputs;
    std::normal_distribution<double> normal;
    for (const int id : graph.parameters()) {
      const ir::Node& n = graph.node(id);
      ir::Tensor t;
      for (const Dim& d : n.results[0].shape) t.shape.push_back(d.value());
      for (std::int64_t i = ir::elements_of(n.results[0]); i > 0; --i)
        t.data.push_back(below(2) == 0 ? normal(rng_) : below(2) == 0 ? -0.0 : 0.0);
      inputs[n.attributes->name] = std::move(t);
    }
    return inputs;
  }

 private:
  static constexpr std::int64_t kRows = 3, kColumns = 12;
  std::mt19937_64 rng_;
  ir::Graph g_;
  int parameters_ = 0;

  int below(int n) { return static_cast<int>(rng_() % static_cast<unsigned>(n)); }
  ir::Value parameter(std::int64_t columns) {
    ir::Attributes a;
    a.name = "x" + std::to_string(parameters_++);
    a.type = {DType::f64, {kRows, columns}};
    const ir::Value v = g_.add(ir::Op::parameter, {}, std::move(a));
    return below(3) == 0 ? ir::map(g_, ir::Function::neg, {v}) : v;
  }
  ir::Value padded(std::int64_t columns) {
    const std::int64_t width = below(static_cast<int>(columns));
    const std::int64_t low = below(static_cast<int>(columns - width) + 1);
    const ir::Value inner =
        width > 2 && below(3) == 0 ? sum_of(2 + below(2), width) : parameter(width);
    const ir::Value v = ir::pad(g_, inner, {0, low}, {0, columns - width - low});
    return below(5) == 0 ? ir::cast(g_, ir::cast(g_, v, DType::f32), DType::f64) : v;
  }
  ir::Value sum_of(int terms, std::int64_t columns) {
    std::vector<ir::Value> list;
    for (int i = 0; i < terms; ++i)
      list.push_back(below(4) == 0 ? parameter(columns) : padded(columns));
    while (list.size() > 1) {
      const auto at = static_cast<std::size_t>(below(static_cast<int>(list.size()) - 1));
      list[at] = ir::map(g_, ir::Function::add, {list[at], list[at + 1]});
      if (below(8) == 0) list.push_back(list[at]);  // read twice
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
    return list[0];
  }
};

TEST(JoinPads, KeepsEveryBit) {
  int joined = 0;
  for (std::uint64_t seed = 1; seed <= 600 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    RandomSum random(seed);
    const ir::Graph before = random.make();
    const ir::Graph after = ir::join_pads(before);
    ASSERT_NO_THROW(ir::verify(after));
    for (const ir::Node& n : after.nodes()) joined += n.op == ir::Op::concat;
    const ir::Tensors inputs = random.inputs(before);
    const ir::Tensors expected = ir::interpret(before, inputs), got = ir::interpret(after, inputs);
    for (const auto& [name, tensor] : expected) {
      for (std::size_t i = 0; i < tensor.data.size(); ++i)
        ASSERT_EQ(std::bit_cast<std::uint64_t>(got.at(name).data[i]),
                  std::bit_cast<std::uint64_t>(tensor.data[i]))
            << name << "[" << i << "]\n"
            << ir::print(before) << ir::print(after);
    }
  }
  EXPECT_GT(joined, 300);
}

}  // namespace
}  // namespace logitless::test

// Gradient rules against central differences of the interpreter.
#include <gtest/gtest.h>

#include <cmath>

#include "compiler/ir/interpreter.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

// Checks the gradients that the text requests, all in one request, whose terms have cotangents g0,
// g1, ...
void check(const std::string& text, double shift = 0.0) {
  SCOPED_TRACE(text);
  const ir::ParsedGraph parsed = ir::parse(text);
  const ir::Graph full = ir::differentiate(parsed.graph, parsed.gradients);
  ir::verify(full);
  ir::Tensors inputs = random_inputs(full, 11);
  for (auto& [name, t] : inputs) {
    if (shift != 0.0 && name[0] == 'x') {
      for (double& v : t.data) v = std::abs(v) + shift;
    }
  }
  const ir::Tensors results = ir::interpret(full, inputs);
  ASSERT_EQ(parsed.gradients.size(), 1u);
  const auto objective = [&](const ir::Tensors& at) {
    const ir::Tensors values = ir::interpret(parsed.graph, at);
    double sum = 0.0;
    for (const auto& term : parsed.gradients[0].terms) {
      const ir::Tensor& y = values.at(term.output);
      for (std::size_t i = 0; i < y.data.size(); ++i)
        sum += y.data[i] * (term.cotangent.empty() ? 1.0 : inputs.at(term.cotangent).data[i]);
    }
    return sum;
  };
  for (const std::string& name : parsed.gradients[0].parameters) {
    const ir::Tensor& d = results.at("d_" + name);
    for (std::size_t i = 0; i < d.data.size(); ++i) {
      constexpr double kStep = 1e-5;
      ir::Tensors up = inputs, down = inputs;
      up[name].data[i] += kStep;
      down[name].data[i] -= kStep;
      const double expected = (objective(up) - objective(down)) / (2.0 * kStep);
      ASSERT_NEAR(d.data[i], expected, 2e-8 + 2e-7 * std::abs(expected)) << name << "[" << i << "]";
    }
  }
}

TEST(Gradients, OfFunctionsOfOneOperand) {
  for (const char* f : {"neg", "abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "tanh",
                        "erf", "sigmoid", "sin", "cos"}) {
    check(std::string("graph g(%x: f64[7], %g: f64[7]) { %y = ") + f +
              " %x return y: %y differentiate y by %g wrt %x }",
          0.3);
  }
  for (const char* f : {"floor", "sign"}) {
    check(std::string("graph g(%x: f64[7], %g: f64[7]) { %y = ") + f +
              " %x return y: %y differentiate y by %g wrt %x }",
          0.1);
  }
}

TEST(Gradients, OfFunctionsOfTwoOperands) {
  for (const char* f : {"add", "sub", "mul", "div", "pow", "fmod", "max", "min"}) {
    check(std::string("graph g(%x: f64[7], %xb: f64[7], %g: f64[7]) { %y = ") + f +
              " %x, %xb return y: %y differentiate y by %g wrt %x, %xb }",
          0.4);
  }
  check(
      "graph g(%x: f64[7], %a: f64[7], %b: f64[7], %g: f64[7]) { %c = lt %x, %a %y = select %c, "
      "%a, %b return y: %y differentiate y by %g wrt %a, %b }");
}

TEST(Gradients, OfShapes) {
  check(
      "graph g(%x: f64[3, 2], %g: f64[4, 3, 2]) { %y = broadcast %x dims(1, 2) : f64[4, 3, 2] "
      "return y: %y differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[3, 4], %g: f64[2, 6]) { %y = reshape %x : f64[2, 6] return y: %y "
      "differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[3, 4, 2], %g: f64[2, 3, 4]) { %y = transpose %x dims(2, 0, 1) return y: %y "
      "differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[5, 4], %g: f64[3, 2]) { %y = slice %x begin(1, 2) end(4, 4) return y: %y "
      "differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[2, 2], %g: f64[5, 3]) { %y = pad %x low(1, 0) high(2, 1) return y: %y "
      "differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[2, 2], %b: f64[3, 2], %g: f64[5, 2]) { %y = concat %x, %b axis(0) return y: "
      "%y differentiate y by %g wrt %x, %b }");
}

TEST(Gradients, OfReductions) {
  for (const char* f : {"reduce_sum", "reduce_max", "reduce_lse", "reduce_product"}) {
    check(std::string("graph g(%x: f64[3, 4, 2], %g: f64[4]) { %y = ") + f +
          " %x dims(0, 2) return y: %y differentiate y by %g wrt %x }");
  }
}

TEST(Gradients, TiesAreShared) {
  const ir::ParsedGraph parsed = ir::parse(
      "graph g(%x: f64[4]) { %y = reduce_max %x dims(0) return y: %y differentiate y wrt %x }");
  const ir::Tensors d = ir::interpret(ir::differentiate(parsed.graph, parsed.gradients),
                                      {{"x", {{4}, {1.0, 3.0, 3.0, 2.0}}}});
  EXPECT_EQ(d.at("d_x").data, (std::vector<double>{0.0, 0.5, 0.5, 0.0}));
}

TEST(Gradients, OfProducts) {
  check(
      "graph g(%a: f64[3, 4], %b: f64[5, 4], %g: f64[3, 5]) { %y = dot %a, %b contract(1; 1) "
      "return y: %y differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[2, 3, 4, 2], %b: f64[2, 4, 5, 2], %g: f64[2, 3, 5]) { %y = dot %a, %b "
      "batch(0; 0) contract(2, 3; 1, 3) return y: %y differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[2, 3, 4], %b: f64[4, 2, 5], %g: f64[4, 2, 3, 5]) { %y = dot %a, %b batch(2, "
      "0; 0, 1) contract(; ) return y: %y differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[3, 4], %g: f64[3, 3]) { %y = dot %a, %a contract(1; 1) return y: %y "
      "differentiate y by %g wrt %a }");
}

TEST(Gradients, OfIndices) {
  check(
      "graph g(%w: f64[5, 3], %t: i64[2, 4], %g: f64[2, 4, 3]) { %y = take %w, %t return y: %y "
      "differentiate y by %g wrt %w }");
  check(
      "graph g(%u: f64[4, 3], %t: i64[4], %g: f64[5, 3]) { %y = scatter_add %t, %u rows(5) return "
      "y: %y differentiate y by %g wrt %u }");
  check(
      "graph g(%x: f64[3, 5, 2], %t: i64[3, 2], %g: f64[3, 2]) { %y = pick %x, %t axis(1) return "
      "y: %y differentiate y by %g wrt %x }");
}

TEST(Gradients, OfAttention) {
  for (const char* causal : {"0", "1"}) {
    check(std::string("graph g(%q: f64[2, 4, 3, 2], %k: f64[2, 2, 5, 2], %v: f64[2, 2, 5, 2], %g: "
                      "f64[2, 4, 3, 2]) { %o, %l = attention %q, %k, %v causal(") +
          causal + ") scale(0.7) return y: %o differentiate y by %g wrt %q, %k, %v }");
  }
}

TEST(Gradients, OfSeveralOutputsAndUses) {
  check(
      "graph g(%x: f64[3], %b: f64[3], %g: f64[3]) { %y = mul %x, %b %s = reduce_sum %y dims(0) %z "
      "= mul %y, %x return y: %s, z: %z differentiate y, z by %g wrt %x, %b }");
}

TEST(Gradients, OfWhatNothingDependsOnAreZero) {
  const ir::ParsedGraph parsed = ir::parse(
      "graph g(%x: f64[2], %b: f64[3]) { %y = exp %x %z = stop_gradient %b return y: %y, z: %z "
      "differentiate y wrt %x, %b }");
  const ir::Graph full = ir::differentiate(parsed.graph, parsed.gradients);
  EXPECT_EQ(ir::interpret(full, random_inputs(full, 1)).at("d_b").data,
            (std::vector<double>{0.0, 0.0, 0.0}));
}

std::string refusal(const std::string& text) {
  try {
    const ir::ParsedGraph parsed = ir::parse(text);
    ir::differentiate(parsed.graph, parsed.gradients);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Gradients, RefuseByName) {
  EXPECT_EQ(refusal("graph g(%x: i64[2]) { return y: %x differentiate y wrt %x }"),
            "differentiate: wrt is i64[2], expected floats");
  EXPECT_EQ(refusal("graph g(%q: f64[1, 1, 2, 2]) { %o, %l = attention %q, %q, %q causal(0) "
                    "scale(1) return y: %l differentiate y wrt %q }"),
            "differentiate: attention: only its first result has a gradient rule");
  EXPECT_EQ(refusal("graph g(%q: f64[1, 1, 2, 2]) { %o, %l = attention %q, %q, %q causal(0) "
                    "scale(1) %a, %b, %c = attention_grad %q, %q, %q, %o, %l, %q causal(0) "
                    "scale(1) return y: %a differentiate y wrt %q }"),
            "differentiate: attention_grad has no gradient rule");
}

}  // namespace
}  // namespace logitless::test

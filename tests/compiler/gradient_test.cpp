// Gradients in special cases: kinks, indices outside the range, masked rows, empty views, second
// derivatives. Plain cases are in rules_test.cpp.
#include <gtest/gtest.h>
#include <logitless/error.h>

#include <cmath>
#include <functional>

#include "compiler/ir/function.h"
#include "compiler/ir/interpreter.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

using Numbers = std::vector<double>;

ir::Graph with_gradients(const ir::ParsedGraph& parsed) {
  ir::Graph graph = ir::differentiate(parsed.graph, parsed.gradients);
  ir::verify(graph);
  return graph;
}

// Returns sum_i <output_i, cotangent_i> of one request.
double objective(const ir::ParsedGraph& parsed, const ir::GradientRequest& request,
                 const ir::Tensors& inputs) {
  const ir::Tensors values = ir::interpret(parsed.graph, inputs);
  double sum = 0.0;
  for (const ir::GradientRequest::Term& term : request.terms) {
    const ir::Tensor& y = values.at(term.output);
    for (std::size_t i = 0; i < y.data.size(); ++i)
      sum += y.data[i] * (term.cotangent.empty() ? 1.0 : inputs.at(term.cotangent).data[i]);
  }
  return sum;
}

// Compares each gradient of each request with central differences.
void compare(const ir::ParsedGraph& parsed, const ir::Tensors& inputs) {
  const ir::Graph full = with_gradients(parsed);
  const ir::Tensors results = ir::interpret(full, inputs);
  ASSERT_FALSE(parsed.gradients.empty());
  for (const ir::GradientRequest& request : parsed.gradients) {
    const std::string prefix = parsed.gradients.size() > 1 ? request.terms[0].output + "." : "";
    for (const std::string& name : request.parameters) {
      const ir::Tensor& d = results.at(prefix + "d_" + name);
      ASSERT_EQ(d.shape, inputs.at(name).shape);
      ir::Tensors moved = inputs;
      for (std::size_t i = 0; i < d.data.size(); ++i) {
        constexpr double kStep = 1e-5;
        const double x = inputs.at(name).data[i];
        moved[name].data[i] = x + kStep;
        const double up = objective(parsed, request, moved);
        moved[name].data[i] = x - kStep;
        const double down = objective(parsed, request, moved);
        moved[name].data[i] = x;
        const double expected = (up - down) / (2.0 * kStep);
        ASSERT_NEAR(d.data[i], expected, 5e-8 + 5e-7 * std::abs(expected))
            << prefix << "d_" << name << "[" << i << "]";
      }
    }
  }
}

void check(const std::string& text, const ir::Tensors& given = {}) {
  SCOPED_TRACE(text);
  const ir::ParsedGraph parsed = ir::parse(text);
  ir::Tensors inputs = random_inputs(parsed.graph, 7);
  for (const auto& [name, tensor] : given) inputs.at(name) = tensor;
  compare(parsed, inputs);
}

Numbers gradient(const std::string& text, const ir::Tensors& inputs, const std::string& of) {
  return ir::interpret(with_gradients(ir::parse(text)), inputs).at("d_" + of).data;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}
std::string refused(const std::string& text) {
  return refusal([&] { with_gradients(ir::parse(text)); });
}

// Returns arguments away from kinks, on both sides of 0 if the function is defined there.
ir::Tensor arguments(ir::Function f, int operand) {
  using enum ir::Function;
  const bool positive = f == log || f == sqrt || f == rsqrt || (f == pow && operand == 0);
  if (positive) return {{6}, {0.2, 0.7, 1.1, 1.9, 2.3, 4.6}};
  if (f == log1p) return {{6}, {-0.8, -0.3, 0.1, 0.9, 2.3, 4.6}};
  if (operand == 0) return {{6}, {-2.6, -1.3, -0.2, 0.4, 1.7, 2.2}};
  return {{6}, {0.6, -1.9, -0.7, 1.4, -0.3, 2.9}};
}

TEST(GradientOf, EveryFunctionOnBothSidesOfZero) {
  int functions = 0;
  for (int k = 0; k <= static_cast<int>(ir::Function::select); ++k) {
    const ir::FunctionInfo& info = ir::info_of(static_cast<ir::Function>(k));
    if (info.kind != ir::FunctionKind::real && info.kind != ir::FunctionKind::arithmetic) continue;
    if (info.function == ir::Function::trigamma) continue;  // refused, see below
    ++functions;
    const std::string name(info.name);
    const bool two = info.operands == 2;
    check("graph g(%a: f64[6], %b: f64[6], %g: f64[6]) { %y = " + name + " %a" +
              (two ? ", %b" : "") + " return y: %y differentiate y by %g wrt %a" +
              (two ? ", %b }" : " }"),
          {{"a", arguments(info.function, 0)}, {"b", arguments(info.function, 1)}});
  }
  EXPECT_EQ(functions, 27);
}

TEST(GradientOf, TrigammaIsRefused) {
  EXPECT_THROW(gradient("graph g(%x: f64[3]) { %y = trigamma %x return y: %y differentiate y wrt "
                        "%x }",
                        {{"x", {{3}, {1, 2, 3}}}}, "x"),
               InvalidArgument);
}

TEST(GradientOf, ComparisonsAndConditionsIsZero) {
  for (const char* compare_with : {"eq", "ne", "lt", "le", "gt", "ge"}) {
    const Numbers d =
        gradient(std::string("graph g(%x: f64[3], %z: f64[3]) { %c = ") + compare_with +
                     " %x, %z %n = logical_not %c %o = logical_or %c, %n %a = "
                     "logical_and %c, %o %y = cast %a : f64[3] return y: %y "
                     "differentiate y wrt %x }",
                 {{"x", {{3}, {1, 2, 3}}}, {"z", {{3}, {2, 2, 2}}}}, "x");
    EXPECT_EQ(d, (Numbers{0, 0, 0})) << compare_with;
  }
}

TEST(GradientOf, TiesAndKinksIsPyTorchs) {
  const ir::Tensor x{{3}, {0.0, -1.0, 2.0}};
  const auto one = [&](const std::string& f) {
    return gradient("graph g(%x: f64[3]) { %y = " + f + " %x return y: %y differentiate y wrt %x }",
                    {{"x", x}}, "x");
  };
  EXPECT_EQ(one("abs"), (Numbers{0, -1, 1}));
  EXPECT_EQ(one("sign"), (Numbers{0, 0, 0}));
  EXPECT_EQ(one("floor"), (Numbers{0, 0, 0}));
  for (const std::string f : {"max", "min"}) {
    const std::string text = "graph g(%x: f64[3], %z: f64[3]) { %y = " + f +
                             " %x, %z return y: %y differentiate y wrt %x, %z }";
    const ir::Tensors at = {{"x", x}, {"z", {{3}, {0.0, 1.0, 1.0}}}};
    const Numbers larger = {0.5, 0, 1}, smaller = {0.5, 1, 0};
    EXPECT_EQ(gradient(text, at, "x"), f == "max" ? larger : smaller);
    EXPECT_EQ(gradient(text, at, "z"), f == "max" ? smaller : larger);
  }
  // Both operands are the same value: the halves add up.
  EXPECT_EQ(gradient("graph g(%x: f64[3]) { %y = max %x, %x return y: %y differentiate y wrt %x }",
                     {{"x", x}}, "x"),
            (Numbers{1, 1, 1}));
  // Ties share the cotangent of their row.
  EXPECT_EQ(gradient("graph g(%x: f64[2, 3], %g: f64[2]) { %y = reduce_max %x dims(1) return y: "
                     "%y differentiate y by %g wrt %x }",
                     {{"x", {{2, 3}, {5, 5, 5, 1, 2, 2}}}, {"g", {{2}, {6, 8}}}}, "x"),
            (Numbers{2, 2, 2, 0, 4, 4}));
}

TEST(GradientOf, PowersOfZero) {
  const ir::Tensors at = {{"x", {{4}, {0, 0, 0, -2}}}, {"n", {{4}, {0, 1, 2, 3}}}};
  const std::string text =
      "graph g(%x: f64[4], %n: f64[4]) { %y = pow %x, %n return y: %y differentiate y wrt %x, %n }";
  EXPECT_EQ(gradient(text, at, "x"), (Numbers{0, 1, 0, 12}));
  const Numbers n = gradient(text, at, "n");
  EXPECT_EQ(Numbers(n.begin(), n.begin() + 3), (Numbers{0, 0, 0}));
  const auto constant = [&](const std::string& exponent) {
    return gradient("graph g(%x: f64[4]) { %n = constant value(" + exponent +
                        ") : f64[4] %y = pow %x, %n return y: %y differentiate y wrt %x }",
                    {{"x", at.at("x")}}, "x");
  };
  EXPECT_EQ(constant("0"), (Numbers{0, 0, 0, 0}));
  EXPECT_EQ(constant("2"), (Numbers{0, 0, 0, -4}));
}

TEST(GradientOf, ShapesAtTheirEdges) {
  check(
      "graph g(%x: f64[], %g: f64[2, 3]) { %y = broadcast %x dims() : f64[2, 3] return y: %y "
      "differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[1, 2, 3], %g: f64[1, 1, 2, 5, 3]) { %y = broadcast %x dims(1, 2, 4) : "
      "f64[1, 1, 2, 5, 3] return y: %y differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[1, 1], %g: f64[]) { %y = reshape %x : f64[] return y: %y differentiate y by "
      "%g wrt %x }");
  check(
      "graph g(%x: f64[2, 3, 4, 2], %g: f64[4, 2, 2, 3]) { %y = transpose %x dims(2, 0, 3, 1) "
      "return y: %y differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[3, 4], %g: f64[0, 4]) { %y = slice %x begin(2, 0) end(2, 4) return y: %y "
      "differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[2, 0], %g: f64[3, 2]) { %y = pad %x low(0, 1) high(1, 1) return y: %y "
      "differentiate y by %g wrt %x }");
  check(
      "graph g(%x: f64[2, 1, 2], %z: f64[2, 3, 2], %e: f64[2, 0, 2], %g: f64[2, 5, 2]) { %y = "
      "concat %x, %z, %e, %x axis(1) return y: %y differentiate y by %g wrt %x, %z, %e }");
}

TEST(GradientOf, ReductionsOverAnyDimensions) {
  for (const char* f : {"sum", "max", "lse"}) {
    for (const char* dims : {"0", "1", "2", "2, 0", "1, 2", "0, 1, 2"}) {
      const std::string list(dims);
      const std::string shape = list == "0"      ? "[4, 2]"
                                : list == "1"    ? "[3, 2]"
                                : list == "2"    ? "[3, 4]"
                                : list == "2, 0" ? "[4]"
                                : list == "1, 2" ? "[3]"
                                                 : "[]";
      check("graph g(%x: f64[3, 4, 2], %g: f64" + shape + ") { %y = reduce_" + f + " %x dims(" +
            list + ") return y: %y differentiate y by %g wrt %x }");
    }
  }
  EXPECT_EQ(refused("graph g(%x: f64[3]) { %y = argmax %x dims(0) return y: %y differentiate y wrt "
                    "%x }"),
            "differentiate: the output is i64[], expected floats");
}

TEST(GradientOf, ProductsInAnyOrderOfDimensions) {
  // The order of the contracted dimensions is that of neither operand.
  check(
      "graph g(%a: f64[2, 3, 4, 5], %b: f64[4, 6, 5, 3], %g: f64[2, 6]) { %y = dot %a, %b "
      "contract(3, 1, 2; 2, 3, 0) return y: %y differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[3, 5, 2, 4], %b: f64[4, 6, 2, 3, 5], %g: f64[4, 2, 6]) { %y = dot %a, %b "
      "batch(3, 2; 0, 2) contract(1, 0; 4, 3) return y: %y differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[3], %b: f64[3], %g: f64[]) { %y = dot %a, %b contract(0; 0) return y: %y "
      "differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[3], %b: f64[], %g: f64[3]) { %y = dot %a, %b contract(; ) return y: %y "
      "differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[3, 2], %b: f64[3, 2], %g: f64[3, 2]) { %y = dot %a, %b batch(0, 1; 0, 1) "
      "contract(; ) return y: %y differentiate y by %g wrt %a, %b }");
  check(
      "graph g(%a: f64[2, 0], %b: f64[0, 3], %g: f64[2, 3]) { %y = dot %a, %b contract(1; 0) "
      "return y: %y differentiate y by %g wrt %a, %b }");
}

TEST(GradientOf, IndicesOutsideAreNothing) {
  const ir::Tensor index{{5}, {-100, 3, 1, 4, 1}};  // of 4: 4 and -100 are outside, 1 occurs twice
  for (const char* dtype : {"i32", "i64"}) {
    const std::string type = std::string(dtype) + "[5]";
    check("graph g(%w: f64[4, 2], %t: " + type +
              ", %g: f64[5, 2]) { %y = take %w, %t return y: %y differentiate y by %g wrt %w }",
          {{"t", index}});
    check("graph g(%u: f64[5, 2], %t: " + type +
              ", %g: f64[4, 2]) { %y = scatter_add %t, %u rows(4) return y: %y differentiate y by "
              "%g wrt %u }",
          {{"t", index}});
    check("graph g(%x: f64[4, 5], %t: " + type +
              ", %g: f64[5]) { %y = pick %x, %t axis(0) return y: %y differentiate y by %g wrt %x "
              "}",
          {{"t", index}});
  }
  check(
      "graph g(%w: f64[4, 2], %t: i64[], %g: f64[2]) { %y = take %w, %t return y: %y differentiate "
      "y by %g wrt %w }");
  check(
      "graph g(%u: f64[2, 3], %t: i64[2, 3], %g: f64[4]) { %y = scatter_add %t, %u rows(4) return "
      "y: %y differentiate y by %g wrt %u }");
}

TEST(GradientOf, AttentionOfAnyLengthsAndGroups) {
  for (const char* queries : {"2", "4", "6"}) {  // with 4 keys, the first two of 6 queries see none
    for (const char* heads : {"1", "2", "4"}) {
      for (const char* causal : {"0", "1"}) {
        const std::string q = std::string("f64[2, 4, ") + queries + ", 3]";
        const std::string kv = std::string("f64[2, ") + heads + ", 4, 3]";
        check("graph g(%q: " + q + ", %k: " + kv + ", %v: " + kv + ", %g: " + q +
              ") { %o, %l = attention %q, %k, %v causal(" + causal +
              ") scale(-0.6) return y: %o differentiate y by %g wrt %q, %k, %v }");
      }
    }
  }
  // With options of scores; some queries see no key.
  for (const char* scores :
       {"softcap(0.7)", "window(2)", "softcap(1.5) window(1)", "softcap(0.5) window(3)"}) {
    for (const char* causal : {"0", "1"}) {
      check(std::string("graph g(%q: f64[1, 2, 3, 3], %k: f64[1, 1, 4, 3], %v: f64[1, 1, 4, 3], "
                        "%g: f64[1, 2, 3, 3]) { %o, %l = attention %q, %k, %v causal(") +
            causal + ") scale(-0.6) " + scores +
            " return y: %o differentiate y by %g wrt %q, %k, %v }");
    }
  }
  check(
      "graph g(%q: f64[2, 2, 3, 3], %k: f64[2, 1, 4, 3], %v: f64[2, 1, 4, 3], %g: f64[2, 2, 3, 3], "
      "%b: f64[1, 2, 3, 4], %s: i64[2, 3], %t: i64[2, 4]) { %o, %l = attention %q, %k, %v, %b, %s, "
      "%t causal(0) scale(0.9) softcap(1.2) window(3) bias(1) segments(1) return y: %o "
      "differentiate y by %g wrt %q, %k, %v }");
  // One value for all three operands, and a slice of the queries is used.
  check(
      "graph g(%q: f64[1, 2, 3, 2]) { %o, %l = attention %q, %q, %q causal(1) scale(1) %s = slice "
      "%o begin(0, 0, 1, 0) end(1, 2, 2, 2) %y = tanh %s return y: %y differentiate y wrt %q }");
}

TEST(GradientOf, Casts) {
  check(
      "graph g(%x: f32[3], %g: f64[3]) { %w = cast %x : f64[3] %e = exp %w %n = cast %e : f32[3] "
      "%y = cast %n : f64[3] return y: %y differentiate y by %g wrt %x }");
  const ir::Graph full = with_gradients(
      ir::parse("graph g(%x: bf16[3], %z: bf16[3]) { %w = cast %x : f32[3] %v = cast %z : f32[3] "
                "%y = dot %w, %v contract(0; 0) return y: %y differentiate y wrt %x, %z }"));
  for (const ir::Output& output : full.outputs())
    EXPECT_EQ(text_of(full.type(output.value)), output.name == "y" ? "f32[]" : "bf16[3]");
  EXPECT_EQ(gradient("graph g(%x: f64[3]) { %i = cast %x : i32[3] %y = cast %i : f64[3] return y: "
                     "%y differentiate y wrt %x }",
                     {{"x", {{3}, {1, 2, 3}}}}, "x"),
            (Numbers{0, 0, 0}));
}

TEST(GradientOf, WidenedSumsHasTheOperandsType) {
  const ir::Graph full = with_gradients(ir::parse(
      "graph g(%x: bf16[4, 3], %w: bf16[5, 3], %t: i64[4]) { %z = dot %x, %w contract(1; 1) : "
      "f32[4, 5] %l = reduce_lse %z dims(1) %s = reduce_sum %x dims(1) : f32[4] %u = scatter_add "
      "%t, %x rows(6) : f32[6, 3] return z: %l, s: %s, u: %u differentiate z, s, u wrt %x, %w }"));
  for (const ir::Output& output : full.outputs()) {
    if (!output.name.starts_with("d_")) continue;
    EXPECT_EQ(text_of(full.type(output.value)), output.name == "d_x" ? "bf16[4, 3]" : "bf16[5, 3]");
  }
}

TEST(GradientOf, StoppedPathsIsZeroAlongThem) {
  EXPECT_EQ(gradient("graph g(%x: f64[2]) { %s = stop_gradient %x %y = mul %x, %s return y: %y "
                     "differentiate y wrt %x }",
                     {{"x", {{2}, {3, 5}}}}, "x"),
            (Numbers{3, 5}));
}

TEST(GradientRequests, AreNamedAfterTheirFirstOutput) {
  const std::string text =
      "graph g(%x: f64[3], %z: f64[3], %g: f64[3]) { %p = mul %x, %z %s = reduce_sum %p dims(0) "
      "%e = exp %p return a: %s, b: %e differentiate a wrt %x, %z differentiate b by %g, a wrt %x "
      "}";
  check(text);
  std::vector<std::string> names;
  const ir::Graph full = with_gradients(ir::parse(text));
  for (const ir::Output& output : full.outputs()) names.push_back(output.name);
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b", "a.d_x", "a.d_z", "b.d_x"}));
}

TEST(GradientRequests, OfParametersAndOfOneOutputTwice) {
  check(
      "graph g(%x: f64[3], %g: f64[3]) { %y = sin %x return x: %x, y: %y differentiate x by %g, y, "
      "y by %g wrt %x }");
}

TEST(GradientRequests, OfWhatNothingReadsAreZerosOfItsType) {
  const ir::Graph full = with_gradients(ir::parse(
      "graph g(%x: f64[2], %z: bf16[3, 2]) { %y = exp %x return y: %y differentiate y wrt %z }"));
  EXPECT_EQ(text_of(full.type(full.outputs()[1].value)), "bf16[3, 2]");
  EXPECT_EQ(ir::interpret(full, random_inputs(full, 1)).at("d_z").data, Numbers(6, 0.0));
}

TEST(GradientRequests, HoldBeforeSizesAreBound) {
  const ir::ParsedGraph parsed = ir::parse(
      "graph g(%x: f64[B, T + 1, D], %w: f64[V, D], %t: i64[B * T]) { %s = slice %x begin(0, 0, 0) "
      "end(B, T, D) %f = reshape %s : f64[B * T, D] %z = dot %f, %w contract(1; 1) %c = concat %z, "
      "%z axis(0) %l = reduce_lse %c dims(1) %p = pick %z, %t axis(1) %m = reduce_sum %l dims(0) "
      "%q = reduce_sum %p dims(0) %loss = sub %m, %q return loss: %loss differentiate loss wrt %x, "
      "%w }");
  const Bindings sizes = {{"B", 2}, {"T", 3}, {"D", 2}, {"V", 5}};
  const ir::Graph late = ir::bind(with_gradients(parsed), sizes);
  const ir::ParsedGraph bound{ir::bind(parsed.graph, sizes), parsed.gradients};
  const ir::Tensors inputs = random_inputs(late, 3);
  compare(bound, inputs);
  EXPECT_EQ(difference(ir::interpret(late, inputs), ir::interpret(with_gradients(bound), inputs)),
            0.0);
}

// Checks the derivative of <gradient, %v>, which is the Hessian times %v.
void check_twice(const std::string& text) {
  SCOPED_TRACE(text);
  ir::ParsedGraph parsed = ir::parse(text);
  ir::ParsedGraph twice{with_gradients(parsed), {{{{"first", "v"}}, {"x"}}}};
  ir::Graph& graph = twice.graph;
  ir::Graph only;  // of its outputs, d_x alone
  only.name = graph.name;
  for (const ir::Node& n : graph.nodes()) only.add(n.op, n.operands, n.attributes, n.name);
  for (const ir::Output& output : graph.outputs())
    if (output.name == "d_x") only.add_output("first", output.value);
  twice.graph = std::move(only);
  compare(twice, random_inputs(twice.graph, 5));
}

TEST(SecondGradients, AreGradientsOfGradients) {
  for (const char* f :
       {"exp", "tanh", "erf", "sigmoid", "sin", "cos", "expm1", "neg", "atan", "erfc", "lgamma"}) {
    check_twice(std::string("graph g(%x: f64[3], %v: f64[3]) { %y = ") + f +
                " %x return y: %y differentiate y wrt %x }");
  }
  check_twice(
      "graph g(%x: f64[3, 4], %v: f64[3, 4], %t: i64[3]) { %l = reduce_lse %x dims(1) %p = pick "
      "%x, %t axis(1) %y = mul %l, %p return y: %y differentiate y wrt %x }");
  check_twice(
      "graph g(%x: f64[3, 4], %v: f64[3, 4]) { %y = dot %x, %x contract(1; 1) %s = sigmoid %y "
      "return y: %s differentiate y wrt %x }");
  check_twice(
      "graph g(%x: f64[4, 2], %v: f64[4, 2], %t: i64[5]) { %y = take %x, %t %e = mul %y, %y %z = "
      "scatter_add %t, %e rows(3) return y: %z differentiate y wrt %x }");
  check_twice(
      "graph g(%x: f64[4, 2], %v: f64[4, 2]) { %m = reduce_max %x dims(0) %b = broadcast %m "
      "dims(1) : f64[4, 2] %y = mul %x, %b %d = div %y, %b %p = mul %d, %y return y: %p "
      "differentiate y wrt %x }");
}

TEST(GradientsRefuse, ByName) {
  EXPECT_EQ(
      refused("graph g(%x: f64[4]) { %y = loop c extent(4) chunk(2) (%i, %p = slice %x axis(0) "
              "factor(1)) { %e = exp %p return e: stack %e axis(0) factor(1) } return y: %y "
              "differentiate y wrt %x }"),
      "differentiate: loop has no gradient rule; differentiate before compiling");
  EXPECT_EQ(refused("graph g(%x: f64[4], %g: f64[3]) { return y: %x differentiate y by %g wrt %x "
                    "}"),
            "differentiate: the cotangent is f64[3], expected f64[4]");
  EXPECT_EQ(refused("graph g(%x: f64[4], %g: i64[4]) { return y: %x differentiate y by %g wrt %x "
                    "}"),
            "differentiate: the cotangent is i64[4], expected f64[4]");
  EXPECT_EQ(refused("graph g(%x: f64[4]) { return y: %x differentiate y wrt %x, %x }"),
            "there are two results of the name 'd_x'");
}

TEST(GradientsRefuse, SecondDerivativesOfAttention) {
  const ir::ParsedGraph parsed = ir::parse(
      "graph g(%q: f64[1, 1, 2, 2]) { %o, %l = attention %q, %q, %q causal(0) scale(1) return y: "
      "%o differentiate y wrt %q }");
  const ir::Graph once = with_gradients(parsed);
  EXPECT_EQ(refusal([&] {
              ir::differentiate(once, {{{{"d_q", ""}}, {"q"}}});
            }),
            "differentiate: attention_grad has no gradient rule");
}

TEST(GradientsRefuse, TheBiasOfAttention) {
  const std::string text =
      "graph g(%q: f64[1, 1, 2, 2], %b: f64[1, 1, 2, 2]) { %o, %l = attention %q, %q, %q, %b "
      "causal(0) scale(1) bias(1) return y: %o differentiate y wrt ";
  with_gradients(ir::parse(text + "%q }"));
  EXPECT_EQ(refused(text + "%q, %b }"),
            "attention: bias has no gradient rule; take stop_gradient of it");
}

TEST(GradientsRefuse, CountsThatDisagree) {
  ir::Graph g = ir::parse("graph g(%x: f64[4]) { %y = exp %x return y: %y }").graph;
  const ir::Value x{0, 0}, y{1, 0};
  EXPECT_EQ(refusal([&] {
              ir::gradients(g, {y}, {x, x}, {x});
            }),
            "differentiate: 1 outputs but 2 cotangents");
}

}  // namespace
}  // namespace logitless::test

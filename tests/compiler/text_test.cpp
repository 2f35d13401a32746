// The text form: round trips, and the position and message of every error.
#include "compiler/ir/text.h"

#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include "compiler/passes/passes.h"
#include "compiler/programs.h"

namespace logitless::test {
namespace {

// Contains every operation once.
constexpr const char* kEverything =
    R"(graph all(%x: f32[N, 8], %w: bf16[16, 8], %t: i64[N], %u: f32[N, 8], %q: f32[2, 4, 6, 8]) {
  %c = constant value(-1.5e-3) : f32[N, 8]
  %n = constant value(2) size(N * 8 - 1) : f32[]
  %i = iota axis(1) : i32[N, 8]
  %a = mul %x, %c
  %s = eq %a, %u
  %b = select %s, %a, %x
  %v = cast %w : f32[16, 8]
  %r = broadcast %n dims() : f32[N, 8]
  %e = reshape %b : f32[8 * N]
  %f = transpose %b dims(1, 0)
  %g = slice %b begin(0, 2) end(N, 7)
  %h = pad %g low(0, 2) high(0, 1)
  %j = concat %h, %r axis(0)
  %k = reduce_lse %j dims(1)
  %l = argmax %j dims(1)
  %z = dot %x, %v contract(1; 1)
  %d = dot %q, %q batch(0, 1; 0, 1) contract(3; 3)
  %p = pick %z, %t axis(1)
  %o = take %v, %t
  %y = scatter_add %t, %o rows(16)
  %at_0, %at_1 = attention %q, %q, %q causal(1) scale(0.25)
  %m = stop_gradient %p
  %ga_0, %ga_1, %ga_2 = attention_grad %q, %q, %q, %at_0, %at_1, %at_0 causal(1) scale(0.25)
  %as_0, %as_1 = attention %q, %q, %q causal(0) scale(0.25) softcap(30) window(7)
  %loop_0, %loop_1 = loop c extent(40) chunk(16) (%first, %part = slice %sliced axis(0) factor(2), %all = whole %w) {
    %up = cast %all : f32[16, 8]
    %pr = dot %part, %up contract(1; 1)
    %su = reduce_sum %pr dims(0)
    return rows: stack %pr axis(0) factor(2), sums: sum %su
  }
  return loss: %m, y: %y
  differentiate loss by %cot wrt %x, %w
}
)";

std::string everything() {
  std::string text = kEverything;
  text.replace(text.find("%q: f32"), 0, "%cot: f32[N], %sliced: f32[80, 8], ");
  return text;
}

TEST(Text, RoundTrips) {
  const ir::ParsedGraph parsed = ir::parse(everything());
  ir::verify(parsed.graph);
  const std::string printed = ir::print(parsed.graph, parsed.gradients);
  const ir::ParsedGraph again = ir::parse(printed);
  EXPECT_EQ(ir::print(again.graph, again.gradients), printed);
  EXPECT_EQ(again.gradients, parsed.gradients);
  EXPECT_EQ(again.graph.size(), parsed.graph.size());
}

TEST(Text, ProgramsRoundTrip) {
  for (const NamedProgram& program : programs()) {
    SCOPED_TRACE(program.name);
    const std::string text = program.make(DType::bf16).text();
    EXPECT_EQ(Graph::parse(text).text(), text);
  }
}

struct Bad {
  const char* text;
  const char* message;
};

TEST(Text, ErrorsHaveAPlace) {
  const Bad table[] = {
      {"", "bad.ir:1:1: expected 'graph', got the end"},
      {"graph g(%x: f32[4]) {\n  %y = foo %x\n}", "bad.ir:2:8: there is no operation 'foo'"},
      {"graph g(%x: f32[4]) {\n  %y = exp %z\n}", "bad.ir:2:12: %z is not defined"},
      {"graph g(%x: f32[4]) {\n  %x = exp %x\n}", "bad.ir:2:3: %x is defined twice"},
      {"graph g(%x: f99[4]) {}", "bad.ir:1:13: dtype 'f99' is unknown"},
      {"graph g(%x: f32[4]) { %y = add %x }", "bad.ir:1:28: add: expected 2 operands, got 1"},
      {"graph g(%x: f32[4]) { %y = reduce_sum %x }", "bad.ir:1:28: reduce_sum needs dims(...)"},
      {"graph g(%x: f32[4]) { %y = exp %x axis(0) }", "bad.ir:1:35: exp has no attribute 'axis'"},
      {"graph g(%x: f32[4]) { %y = exp %x : f32[5] }",
       "bad.ir:1:28: exp gives f32[4], declared is f32[5]"},
      {"graph g(%x: f32[4], %z: f32[5]) { %y = add %x, %z }",
       "bad.ir:1:40: add: operands are f32[4] and f32[5], expected equal shapes"},
      {"graph g(%x: f32[99999999999999999999]) {}",
       "bad.ir:1:17: expected a whole number of 64 bits, got '99999999999999999999'"},
      {"graph g(%x: f32[4]) { %y = exp %x", "bad.ir:1:34: expected '}', got the end"},
      {"graph g(%x: f32[4]) { return y: %x } more", "bad.ir:1:38: expected the end, got 'more'"},
      {"graph g(%x: f32[4]) { %a, %b = exp %x }", "bad.ir:1:23: exp gives 1 values, not 2"},
      {"graph g(%x: f32[4]) { return y: %x differentiate z wrt %x }",
       "bad.ir:1:50: there is no result 'z'"},
      {"graph g(%x: f32[4]) { %y = reduce_sum %x dims(0) dims(0) }",
       "bad.ir:1:50: 'dims' is given twice"},
      {"graph g(%x: f32[4]) { %y = constant value(1) }",
       "bad.ir:1:28: constant needs the type of its result: ... : f32[4, 8]"},
      {"graph g(%x: f32[4], %x: f32[4]) {}",
       "bad.ir:1:21: parameter: there are two of the name 'x'"},
      {"graph g(%x: f32[((((((((((((((((((4))))))))))))))))))]) {}",
       "bad.ir:1:34: a size nests too deep"},
  };
  for (const Bad& bad : table) {
    try {
      ir::parse(bad.text, "bad.ir");
      ADD_FAILURE() << "accepted: " << bad.text;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()).substr(0, std::string(bad.message).size()), bad.message)
          << bad.text;
    }
  }
}

TEST(Sizes, ArePolynomials) {
  const Dim b = Dim::symbol("B"), t = Dim::symbol("T");
  EXPECT_EQ((b * (t - Dim(1))).text(), "-1 * B + B * T");
  EXPECT_EQ(b * t + Dim(2), Dim(2) + t * b);
  EXPECT_EQ((b * t - t * b).text(), "0");
  EXPECT_EQ((b * t - Dim(1)).bind({{"B", 3}, {"T", 5}}), Dim(14));
  EXPECT_EQ((b * t).bind({{"B", 3}}).text(), "3 * T");
  EXPECT_THROW(b.value(), InvalidArgument);
  EXPECT_THROW(Dim::symbol("4x"), InvalidArgument);
  EXPECT_THROW(Dim(INT64_MAX) * Dim(2), InvalidArgument);
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Compile, RefusesByName) {
  const auto parsed = [] {
    return Graph::parse("graph g(%x: f32[N]) { %y = exp %x return y: %y }");
  };
  EXPECT_EQ(refusal([&] { compile(parsed()); }),
            "compile: the size N has no value; give it in sizes");
  EXPECT_EQ(refusal([&] { compile(parsed(), {.sizes = {{"N", -1}}}); }), "compile: size N is -1");
  EXPECT_EQ(refusal([&] {
              compile(parsed(), {.sizes = {{"N", INT64_MAX}}});
            }),
            "compile: sizes: expected values of at most 2^60 bytes together, got more: parameter "
            "makes 9223372036854775807 elements");
  EXPECT_EQ(refusal([&] {
              compile(parsed(), {.sizes = {{"N", 4}, {"T", 4}}});
            }),
            "compile: sizes: the program has no size 'T'; its sizes are N");
  EXPECT_EQ(refusal([&] {
              compile(Graph::parse("graph g(%x: f32[4]) { %y = exp %x return y: %y }"),
                      {.sizes = {{"N", 4}}});
            }),
            "compile: sizes: the program has no size 'N'; all of its sizes are numbers");
  // A size that no type shows.
  EXPECT_EQ(refusal([&] {
              compile(Graph::parse("graph g(%x: f32[8]) { %y = slice %x begin(S) end(S + 4) "
                                   "return y: %y }"),
                      {.sizes = {{"S", 2}}});
            }),
            "accepted");
  EXPECT_EQ(refusal([&] { compile(Graph("empty")); }), "compile: the program has no results");
  const CompiledProgram program = compile(parsed(), {.sizes = {{"N", 4}}});
  EXPECT_EQ(refusal([&] { program.parameter("z"); }), "there is no parameter 'z'; there are x");
  EXPECT_EQ(refusal([&] { program.run({}, {}, nullptr); }), "run: 0 parameters, expected 1");
  EXPECT_EQ(refusal([&] {
              compile(
                  Graph::parse("graph g(%q: f64[1, 1, 2, 2]) { %o, %l = attention %q, %q, %q "
                               "causal(0) scale(1) return o: %o }"));
            }),
            "attention: no kernel takes f64; expected f32, bf16 or f16");
}

TEST(Builder, NamesTheOperation) {
  Graph g;
  const Value x = g.parameter("x", DType::f32, {4, 5}), y = g.parameter("y", DType::f32, {3});
  EXPECT_EQ(refusal([&] { (void)(x + y); }), "add: the operands are [4, 5] and [3]");
  EXPECT_EQ(refusal([&] { slice(x, 2, 0, 1); }), "slice: axis is 2 of [4, 5]");
  EXPECT_EQ(refusal([&] { apply("foo", {x}); }), "apply: there is no function 'foo'");
  Graph other;
  const Value z = other.parameter("z", DType::f32, {4, 5});
  EXPECT_EQ(refusal([&] { (void)(x + z); }), "map: operands are of two graphs");
  EXPECT_EQ(refusal([&] { exp(Value()); }), "map: an operand is no value of a graph");
}

TEST(Compile, DumpsAndReports) {
  const Graph graph = programs()[0].make(DType::f32);
  std::vector<std::string> passes;
  CompileOptions options;
  options.sizes = programs()[0].sizes;
  options.dump_after = "all";
  options.dump = [&](std::string_view pass, std::string_view text) {
    passes.emplace_back(pass);
    EXPECT_NO_THROW(ir::parse(text));
  };
  const CompiledProgram program = compile(graph, options);
  EXPECT_EQ(passes,
            (std::vector<std::string>{"eliminate-common", "eliminate-dead", "near-results",
                                      "narrow", "part-products", "spread-masks", "sink-puts",
                                      "join-pads", "widen-sums", "split-lse", "recompute-cheap",
                                      "plan-unchunked", "lower-heads", "choose-chunks"}));
  EXPECT_NE(program.explain().find("along dimension 0"), std::string::npos) << program.explain();
  EXPECT_NE(program.report_json().find("\"timeline\""), std::string::npos);
  EXPECT_NE(program.report_html().find("<svg"), std::string::npos);
  options.memory_budget = 1;
  options.strict = true;
  EXPECT_NE(refusal([&] { compile(graph, options); }).find("the budget is 1"), std::string::npos);
}

}  // namespace
}  // namespace logitless::test

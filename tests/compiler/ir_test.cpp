// The IR: sizes as polynomials, names that print unchanged, all errors of the parser and the
// builder, verify and bind. Round trips of all operations are in text_test.cpp.
#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include <functional>
#include <random>

#include "compiler/ir/build.h"
#include "compiler/ir/interpreter.h"
#include "compiler/ir/text.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

template <typename E>
std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing thrown";
}
std::string refusal(const std::function<void()>& call) { return thrown<InvalidArgument>(call); }

// --- sizes

Dim random_dim(std::mt19937& rng, int depth) {
  const auto below = [&](unsigned n) { return static_cast<int>(rng() % n); };
  if (depth == 0 || below(4) == 0) {
    if (below(2) == 0) return Dim(below(9) - 4);
    return Dim::symbol(std::string(1, static_cast<char>('A' + below(3))));
  }
  const Dim a = random_dim(rng, depth - 1), b = random_dim(rng, depth - 1);
  const int kind = below(3);
  return kind == 0 ? a + b : kind == 1 ? a - b : a * b;
}

TEST(Sizes, AreARingThatBindingKeeps) {
  std::mt19937 rng(1);
  for (int round = 0; round < 500; ++round) {
    const Dim a = random_dim(rng, 3), b = random_dim(rng, 3), c = random_dim(rng, 2);
    EXPECT_EQ(a + b, b + a);
    EXPECT_EQ(a * b, b * a);
    EXPECT_EQ(a * (b + c), a * b + a * c);
    EXPECT_EQ(a - a, Dim(0));
    const Bindings all = {{"A", -3}, {"B", 7}, {"C", 2}};
    EXPECT_EQ((a * b + c).bind(all).value(),
              a.bind(all).value() * b.bind(all).value() + c.bind(all).value());
    EXPECT_EQ((a * b).bind({{"B", 7}}).bind({{"A", -3}, {"C", 2}}), (a * b).bind(all));
  }
}

TEST(Sizes, ReadBackFromTheirText) {
  std::mt19937 rng(2);
  for (int round = 0; round < 500; ++round) {
    const Dim a = random_dim(rng, 3);
    EXPECT_EQ(ir::parse_type("f32[" + a.text() + "]").shape, Shape{a}) << a.text();
  }
}

TEST(Sizes, HaveOneText) {
  const Dim n = Dim::symbol("N"), t = Dim::symbol("T_2");
  EXPECT_EQ((Dim(3) - n * Dim(2)).text(), "-2 * N + 3");
  EXPECT_EQ((n - t - Dim(1)).text(), "N - T_2 - 1");
  EXPECT_EQ((t * n * t).text(), "N * T_2 * T_2");
  EXPECT_EQ((n * t).symbols(), (std::vector<std::string>{"N", "T_2"}));
  EXPECT_EQ(product({}).text(), "1");
  EXPECT_EQ(product({n, 0, t}).text(), "0");
  EXPECT_EQ(text_of(Shape{4, n * t}), "[4, N * T_2]");
  EXPECT_EQ(text_of(Shape{}), "[]");
}

TEST(Sizes, DoNotOverflow) {
  const std::int64_t most = INT64_MAX;
  EXPECT_EQ(refusal([&] { Dim(most) + Dim(1); }),
            "a size overflows 64 bits: 9223372036854775807 + 1");
  EXPECT_EQ(refusal([&] { Dim(most) * Dim(-2); }),
            "a size overflows 64 bits: 9223372036854775807 * -2");
  // The lowest 64-bit integer has no text that reads back.
  EXPECT_EQ(refusal([&] { Dim(-most) - Dim(1); }),
            "a size overflows 64 bits: -9223372036854775807 + -1");
  const Dim n = Dim::symbol("N");
  EXPECT_EQ(refusal([&] {
              (n * n).bind({{"N", std::int64_t{1} << 32}});
            }),
            "a size overflows 64 bits: 4294967296 * 4294967296");
  EXPECT_EQ((n * Dim(-most)).bind({{"N", 1}}).value(), -most);
  EXPECT_EQ(refusal([&] { (void)(n - Dim(1)).value(); }),
            "the size N - 1 is not bound to a number");
}

TEST(Sizes, HaveFewTerms) {
  Dim sum;
  for (int i = 0; i < 256; ++i) sum += Dim::symbol("v" + std::to_string(i));
  EXPECT_EQ(refusal([&] { sum + Dim::symbol("N"); }), "a size has more than 256 terms");
  EXPECT_EQ(refusal([&] { sum* sum; }), "a size has more than 256 terms");
  Dim power(1);
  for (int i = 0; i < 32; ++i) power = power * Dim::symbol("N");
  EXPECT_EQ(power.bind({{"N", 1}}), Dim(1));
  EXPECT_EQ(refusal([&] { power* Dim::symbol("N"); }), "a size multiplies more than 32 names");
}

TEST(Sizes, AreNamedByLettersDigitsAndUnderscores) {
  for (const char* good : {"N", "_", "batch_2", "aB9"}) EXPECT_EQ(Dim::symbol(good).text(), good);
  for (const char* bad : {"", "2N", "N.T", "N ", "-N", "\xc3\xa4"}) {
    EXPECT_EQ(refusal([&] { Dim::symbol(bad); }),
              std::string("'") + bad + "' is no name of a size: expected letters, digits and _");
  }
}

// --- text

std::string printed(const std::string& text) {
  const ir::ParsedGraph parsed = ir::parse(text);
  ir::verify(parsed.graph);
  return ir::print(parsed.graph, parsed.gradients);
}

TEST(Names, PrintTheSameAgain) {
  const std::string q = "graph g(%q: f32[1, 1, 2, 2]) { ";
  const std::string attend = " = attention %q, %q, %q causal(0) scale(1) ";
  for (const std::string& text :
       {q + "%a_0 = exp %q %a, %b" + attend + "}", q + "%a_1 = exp %q %a, %b" + attend + "}",
        q + "%a, %b" + attend + "%a_0 = exp %q %a_1 = exp %q %a_1_1 = exp %q }",
        q + "%a_0, %b" + attend + "%a, %c" + attend + "%a_0_1 = exp %q }",
        q + "%0, %1" + attend + "%1_0 = exp %q %2 = exp %1_0 }",
        q + "%_0, %b" + attend + "%., %c" + attend + "%.. = exp %_0 }",
        q + "%q_0 = exp %q %q_1, %q_2" + attend + "%q_3, %q_4" + attend + "}",
        std::string("graph g(%0: f32[2], %1_1: f32[2]) { %a = exp %0 %1 = exp %1_1 %2 = exp %1 }"),
        std::string("graph(%x: f32[2]) { %x_1 = exp %x %y = exp %x_1 %x_2 = exp %x }")}) {
    const std::string once = printed(text);
    EXPECT_EQ(printed(once), once) << text;
  }
}

TEST(Names, OfHintsAreMadeUnique) {
  ir::Graph g;
  ir::Attributes a;
  a.name = "x";
  a.type = {DType::f32, {2}};
  const ir::Value x = g.add(ir::Op::parameter, {}, a);
  for (const char* hint : {"x", "y", "y", "y_1", ""}) ir::map(g, ir::Function::exp, {x}, hint);
  EXPECT_EQ(ir::print(g),
            "graph main(%x: f32[2]) {\n"
            "  %x_1 = exp %x : f32[2]\n"
            "  %y = exp %x : f32[2]\n"
            "  %y_1 = exp %x : f32[2]\n"
            "  %y_1_1 = exp %x : f32[2]\n"
            "  %4 = exp %x : f32[2]\n"
            "}\n");
}

TEST(Numbers, ReadBackBitForBit) {
  for (const char* number : {"0", "-0", "0.1", "1e-300", "5e-324", "1.7976931348623157e+308", "inf",
                             "-inf", "nan", "-2.5e-07", "123456789012345680"}) {
    const std::string text =
        std::string("graph g() { %c = constant value(") + number + ") : f64[] }";
    const std::string once = printed(text);
    EXPECT_NE(once.find(std::string("value(") + number + ")"), std::string::npos) << once;
    EXPECT_EQ(printed(once), once);
  }
}

struct Bad {
  std::string text;
  std::string message;
};

// Puts a statement about %x: f32[4, 6], %z: f32[4, 6], %n: i64[4], %c: i8[4, 6], %q: f32[2, 4, 6,
// 8] at column 1 of line 2.
Bad body(const std::string& statement, const std::string& message) {
  return {
      "graph g(%x: f32[4, 6], %z: f32[4, 6], %n: i64[4], %c: i8[4, 6], %q: f32[2, 4, 6, 8]) {\n" +
          statement + "\n}",
      message};
}

void expect_refused(const std::vector<Bad>& table) {
  for (const Bad& bad : table) {
    EXPECT_EQ(refusal([&] { ir::parse(bad.text, "a.ir"); }), "a.ir:" + bad.message) << bad.text;
  }
}

TEST(ParserRefuses, WhatIsNoProgram) {
  expect_refused({
      {"graph", "1:6: expected '(', got the end"},
      {"graph g(", "1:9: expected a value such as %x, got the end"},
      {"graph g(%: f32[4]) {}", "1:9: expected a value such as %x, got '%'"},
      {"graph g(%x f32[4]) {}", "1:12: expected ':', got 'f32'"},
      {"graph g(%x: f32) {}", "1:16: expected '[', got ')'"},
      {"graph g(%x: 4) {}", "1:13: expected a type such as f32[4, N], got '4'"},
      {"graph g(%x: f32[4 4]) {}", "1:19: expected ']', got '4'"},
      {"graph g(%x: f32[N.T]) {}",
       "1:17: 'N.T' is no name of a size: expected letters, digits and _"},
      {"graph g(%x: f32[4e1]) {}", "1:17: expected a whole number of 64 bits, got '4e1'"},
      {"graph g(%x: f32[9223372036854775808]) {}",
       "1:17: expected a whole number of 64 bits, got '9223372036854775808'"},
      {"graph g(%x: f32[3 - 4]) {}", "1:9: parameter: the result is f32[-1]"},
      {"graph g(%x: f32[9223372036854775807 * 2]) {}",
       "1:37: a size overflows 64 bits: 9223372036854775807 * 2"},
      {"graph g(%x: f32[----------------------4]) {}", "1:34: a size nests too deep"},
      {"# a comment\n\n  graph g() {\t# another\n\r ; }", "4:3: expected '}', got ';'"},
      {"graph g() { return }", "1:20: expected a name of a result, got '}'"},
      {"graph g(%x: f32[4]) { return y: %x, y: %x }",
       "1:37: there are two results of the name 'y'"},
      {"graph g(%x: f32[4]) { return y: %z }", "1:33: %z is not defined"},
      {"graph g(%x: f32[4]) { return y: %x differentiate y wrt %y }", "1:56: %y is no parameter"},
      {"graph g(%x: f32[4]) { return y: %x differentiate y by %y wrt %x }",
       "1:55: %y is no parameter"},
      {"graph g(%x: f32[4]) { return y: %x differentiate y %x }", "1:52: expected 'wrt', got '%x'"},
      {std::string("graph g() {\0}", 13), "1:12: expected '}', got the byte 0"},
      {"graph g() {\xc3\xa4}", "1:12: expected '}', got the byte 195"},
      {"graph g() {}\x7f", "1:13: expected the end, got the byte 127"},
  });
}

TEST(ParserRefuses, WhatIsNoStatement) {
  expect_refused({
      body("%y exp %x", "2:4: expected '=', got 'exp'"),
      body("%y = %x", "2:6: expected an operation, got '%x'"),
      body("%y = parameter", "2:6: there is no operation 'parameter'"),
      body("%y = map %x", "2:6: there is no operation 'map'"),
      body("%y, %y = attention %q, %q, %q causal(1) scale(1)", "2:5: %y is defined twice"),
      body("%y = attention %q, %q, %q causal(1) scale(1)", "2:1: attention gives 2 values, not 1"),
      body("%y = add %x,", "3:1: expected a value such as %x, got '}'"),
      body("%y = constant value(x) : f32[]", "2:21: expected a number, got 'x'"),
      body("%y = constant value(1e999) : f32[]", "2:21: expected a number, got '1e999'"),
      body("%y = iota axis(1001) : i64[4]", "2:16: expected a dimension, got 1001"),
      body("%y = iota axis(-1) : i64[4]", "2:16: expected a whole number of 64 bits, got '-'"),
      body("%y = iota axis(0)", "2:6: iota needs the type of its result: ... : f32[4, 8]"),
      body("%y = dot %x, %z contract(1, 1)", "2:30: expected ';', got ')'"),
      body("%y = dot %x, %z", "2:6: dot needs contract(...)"),
      body("%y = slice %x begin(0, 0)", "2:6: slice needs end(...)"),
      body("%y = pad %x low(0, 0)", "2:6: pad needs high(...)"),
      body("%y = attention %q, %q, %q scale(1)", "2:6: attention needs causal(...)"),
      body("%y = loop c", "3:1: expected 'extent', got '}'"),
      body("%y = loop c extent(4) chunk(2) (%i, %p = part %x) {}",
           "2:37: expected slice or whole, got 'part'"),
      body("%y = loop c extent(4) chunk(2) (%i, %p = slice %x axis(2) factor(1)) {}",
           "2:37: axis is 2 of f32[4, 6]"),
      body("%y = loop c extent(4) chunk(2) (%i) { return s: mean %i }",
           "2:46: expected stack, sum, max or lse, got 'mean'"),
      body("%y = loop c extent(4) chunk(2) (%i) { return s: sum %x }", "2:53: %x is not defined"),
  });
}

TEST(ParserRefuses, TypesThatDisagree) {
  expect_refused({
      body("%y = exp %n", "2:6: exp: operand 0 is i64[4], expected floats"),
      body("%y = add %x, %c",
           "2:6: add: operands are f32[4, 6] and i8[4, 6], expected equal dtypes"),
      body("%y = select %x, %x, %z",
           "2:6: select: operand 0 is f32[4, 6], expected i8 (a "
           "condition)"),
      body("%y = logical_not %x",
           "2:6: logical_not: operand 0 is f32[4, 6], expected i8 (a condition)"),
      body("%y = iota axis(1) : i64[4]", "2:6: iota: axis is 1, expected 0 to 0"),
      body("%y = iota axis(0) : f32[4]", "2:6: iota: the result is f32[4], expected i32 or i64"),
      body("%y = reshape %x : f32[4, 5]", "2:6: reshape: f32[4, 6] has not the elements of [4, 5]"),
      body("%y = reshape %x : bf16[24]", "2:6: reshape gives f32[24], declared is bf16[24]"),
      body("%y = broadcast %n dims(0, 1) : i64[4, 4]",
           "2:6: broadcast: dims has 2 entries for an operand of rank 1"),
      body("%y = broadcast %x dims(1, 0) : f32[6, 4]", "2:6: broadcast: dims does not ascend"),
      body("%y = broadcast %n dims(2) : i64[4, 4]", "2:6: broadcast: dims names dimension 2 of 2"),
      body("%y = broadcast %n dims(0) : i64[5, 4]",
           "2:6: broadcast: dimension 0 of i64[4] goes to one of size 5"),
      body("%y = transpose %x dims(0)", "2:6: transpose: dims has 1 entries for rank 2"),
      body("%y = transpose %x dims(0, 0)", "2:6: transpose: dims names dimension 0 twice"),
      body("%y = slice %x begin(0) end(4)",
           "2:6: slice: begin and end have 1 and 1 entries for rank 2"),
      body("%y = slice %x begin(2, 0) end(1, 6)",
           "2:6: slice: dimension 0 of f32[4, 6] is cut from 2 to 1"),
      body("%y = slice %x begin(0, 0) end(4, 7)",
           "2:6: slice: dimension 1 of f32[4, 6] is cut from 0 to 7"),
      body("%y = pad %x low(0, -1) high(0, 0)", "2:6: pad: dimension 1 is padded by -1"),
      body("%y = concat axis(0)", "2:6: concat: expected operands"),
      body("%y = concat %x, %x axis(2)", "2:6: concat: axis is 2, expected 0 to 1"),
      body("%y = concat %x, %n axis(0)", "2:6: concat: operands are f32[4, 6] and i64[4]"),
      body("%t = transpose %x dims(1, 0) %y = concat %x, %t axis(0)",
           "2:35: concat: operands are f32[4, 6] and f32[6, 4], expected equal but for dimension "
           "0"),
      body("%y = reduce_sum %x dims()", "2:6: reduce_sum: dims is empty"),
      body("%y = reduce_lse %n dims(0)", "2:6: reduce_lse: operand 0 is i64[4], expected floats"),
      body("%y = reduce_sum %c dims(0)", "2:6: reduce_sum: an i8 is a condition: cast it first"),
      body("%y = reduce_sum %x dims(0) : bf16[6]",
           "2:6: reduce_sum: result of f32 operands cannot be bf16"),
      body("%y = argmax %x dims(0, 1)",
           "2:6: reduce_argmax: argmax runs over one dimension, got 2"),
      body("%y = dot %x, %z contract(1; 0)",
           "2:6: dot: dimension 1 of f32[4, 6] meets dimension 0 of f32[4, 6]"),
      body("%y = dot %x, %z contract(1; )", "2:6: dot: contract names 1 and 0 dimensions"),
      body("%y = dot %x, %z batch(0; ) contract(1; 1)", "2:6: dot: batch names 1 and 0 dimensions"),
      body("%y = dot %x, %z batch(1; 1) contract(1; 1)",
           "2:6: dot: the first operand names dimension 1 twice"),
      body("%y = take %x, %z", "2:6: take: operand 1 is f32[4, 6], expected i32 or i64"),
      body("%y = scatter_add %n, %q rows(3)",
           "2:6: scatter_add: updates f32[2, 4, 6, 8] do not begin with the shape of the index "
           "i64[4]"),
      body("%y = scatter_add %n, %x rows(3, 4)", "2:6: scatter_add: expected rows"),
      body("%y = pick %x, %n axis(0)", "2:6: pick: the index is i64[4], expected the shape [6]"),
      body("%y, %l = attention %q, %q, %x causal(1) scale(1)",
           "2:10: attention: v is f32[4, 6], expected the type of k, f32[2, 4, 6, 8]"),
      body(
          "%s = slice %q begin(0, 0, 0, 0) end(2, 3, 6, 8) %y, %l = attention %q, %s, %s causal(1) "
          "scale(1)",
          "2:58: attention: the heads of q, 4, are no multiple of those of k, 3"),
      body("%y, %l = attention %q, %q, %q causal(1) scale(1) softcap(-2)",
           "2:10: attention: softcap is -2, expected a positive number, or 0 for none"),
      body("%y, %l = attention %q, %q, %q causal(1) scale(1) bias(1)",
           "2:10: attention: expected 4 operands, got 3"),
      body("%y, %l = attention %q, %q, %q, %q causal(1) scale(1) bias(1)",
           "2:10: attention: bias is f32[2, 4, 6, 8], expected f32[2, 4, 6, 6], f32 and any of the "
           "first three sizes 1 allowed"),
      body("%y, %l = attention %q, %q, %q, %n, %n causal(1) scale(1) segments(1)",
           "2:10: attention: segments are i64[4] and i64[4], expected i64[2, 6] and i64[2, 6]"),
      body("%y = loop c extent(5) chunk(2) (%i, %p = slice %x axis(0) factor(1)) { return s: "
           "stack %p axis(0) factor(1) }",
           "2:6: loop: operand 0 is f32[4, 6], expected 5 along dimension 0"),
      body("%y = loop c extent(4) chunk(0) (%i, %p = slice %x axis(0) factor(1)) { return s: "
           "stack %p axis(0) factor(1) }",
           "2:6: loop: chunks of 0 of 4"),
      body("%y = loop c extent(4) chunk(2) (%i, %p = slice %x axis(0) factor(1)) { return s: "
           "sum %p }",
           "2:6: loop: result 0 has the size of a chunk in f32[c, 6]"),
      body("%y = loop c extent(4) chunk(2) (%i, %p = slice %x axis(0) factor(1)) { return s: "
           "stack %p axis(1) factor(1) }",
           "2:6: loop: result 0 is f32[c, 6], expected c along dimension 1"),
  });
}

TEST(ParserRefuses, TypesAlone) {
  EXPECT_EQ(text_of(ir::parse_type(" bf16 [ 4 , 2*N ] ")), "bf16[4, 2 * N]");
  EXPECT_EQ(refusal([] { ir::parse_type("f32[4] x"); }), "type:1:8: expected the end, got 'x'");
  EXPECT_EQ(refusal([] { ir::parse_type("f32[4"); }), "type:1:6: expected ']', got the end");
}

TEST(ParserRefuses, DepthBeforeTheStackEnds) {
  std::string text = "graph g(%x: f32[4]) { ";
  for (int i = 0; i < 17; ++i) text += "%y = loop c extent(4) chunk(2) (%i) { ";
  EXPECT_EQ(refusal([&] { ir::parse(text, "a.ir"); }).substr(0, 5), "a.ir:");
  EXPECT_NE(refusal([&] { ir::parse(text, "a.ir"); }).find(": loops nest too deep"),
            std::string::npos);
  EXPECT_NE(refusal([&] {
              ir::parse("graph g(%x: f32[" + std::string(100000, '('), "a.ir");
            }).find("1:34: a size nests too deep"),
            std::string::npos);
}

// --- verify

ir::Graph small_graph() {
  return ir::parse(
             "graph g(%x: f32[4], %z: f32[4]) { %a = add %x, %z %b = exp %a %l = loop c extent(4) "
             "chunk(2) (%i, %p = slice %b axis(0) factor(1)) { %e = exp %p return e: stack %e "
             "axis(0) factor(1) } return y: %l }")
      .graph;
}
// Breaks a graph by force, which passes cannot.
ir::Node& node(ir::Graph& g, int id) { return const_cast<ir::Node&>(g.node(id)); }
// Gives a node other attributes.
void with(ir::Graph& g, int id, const std::function<void(ir::Attributes&)>& change) {
  ir::Attributes attributes = *node(g, id).attributes;
  change(attributes);
  node(g, id).attributes = attributes;
}

TEST(Verify, NamesTheNodeAndTheRule) {
  ir::Graph g = small_graph();
  EXPECT_NO_THROW(ir::verify(g));
  const auto broken = [](const std::function<void(ir::Graph&)>& change) {
    ir::Graph graph = small_graph();
    change(graph);
    return thrown<InternalError>([&] { ir::verify(graph); });
  };
  EXPECT_EQ(broken([](ir::Graph& h) {
              node(h, 2).operands[1] = {3, 0};
            }),
            "node 2 (map) reads a value that is not before it");
  EXPECT_EQ(broken([](ir::Graph& h) {
              node(h, 2).operands[1] = {1, 1};
            }),
            "node 2 (map) reads a value that is not before it");
  EXPECT_EQ(broken([](ir::Graph& h) { node(h, 3).operands.clear(); }),
            "node 3: exp: expected 1 operands, got 0");
  EXPECT_EQ(broken([](ir::Graph& h) {
              std::vector<ir::Type> types = *node(h, 3).results;
              types[0].dtype = DType::f64;
              node(h, 3).results = types;
            }),
            "node 3 (map) has other types than its rule gives");
  EXPECT_EQ(broken([](ir::Graph& h) { with(h, 1, [](ir::Attributes& a) { a.name = "x"; }); }),
            "two parameters 'x'");
  EXPECT_EQ(broken([](ir::Graph& h) {
              const_cast<ir::Output&>(h.outputs()[0]).value = {9, 0};
            }),
            "result 'y' is nothing");
  EXPECT_EQ(broken([](ir::Graph& h) {
              with(h, 4, [](ir::Attributes& a) { a.loop = std::make_shared<ir::Loop>(); });
            }),
            "node 4: loop: chunks of 0 of 0");
  EXPECT_EQ(broken([](ir::Graph& h) {
              auto loop = std::make_shared<ir::Loop>(*h.node(4).attributes->loop);
              node(loop->body, 2).operands[0] = {7, 0};
              with(h, 4, [&](ir::Attributes& a) { a.loop = loop; });
            }),
            "node 2 (map) reads a value that is not before it");
}

TEST(Verify, IsNotNeededForWhatAddRefuses) {
  ir::Graph g = small_graph();
  EXPECT_EQ(thrown<InternalError>([&] {
              ir::map(g, ir::Function::exp, {{99, 0}});
            }),
            "map: an operand is no value of this graph");
  EXPECT_EQ(thrown<InternalError>([&] {
              g.add_output("n", {99, 0});
            }),
            "result 'n' is no value of this graph");
  EXPECT_EQ(refusal([&] { g.add_output("", {0, 0}); }), "a result has no name");
  EXPECT_NO_THROW(ir::verify(g));
}

TEST(GraphQueries, OrderParametersAndUsers) {
  const ir::Graph g = small_graph();
  EXPECT_EQ(g.parameters(), (std::vector<int>{0, 1}));
  EXPECT_EQ(g.find_parameter("z"), 1);
  EXPECT_EQ(g.find_parameter("a"), -1);
  const ir::Lists<int> users = g.users();
  const std::vector<std::vector<int>> expected = {{2}, {2}, {3}, {4}, {}};
  ASSERT_EQ(users.size(), expected.size());
  for (std::size_t id = 0; id < expected.size(); ++id)
    EXPECT_EQ(std::vector<int>(users[id].begin(), users[id].end()), expected[id]);
}

// --- bind

TEST(Bind, PutsNumbersEverywhere) {
  const ir::Graph g =
      ir::parse(
          "graph g(%x: f32[N, 6], %t: i64[N]) { %n = constant value(0.5) size(N * 6) : f32[] %s = "
          "slice %x begin(N - 1, 0) end(N, 6) %p = pad %s low(N - 1, 0) high(0, N) %i = iota "
          "axis(0) : i64[2 * N] %u = scatter_add %t, %x rows(N + 2) %l = loop c extent(6) chunk(4) "
          "(%f, %q = slice %x axis(1) factor(1)) { %k = constant value(1) : f32[N, c] %e = add %q, "
          "%k return e: stack %e axis(1) factor(1) } return n: %n, p: %p, i: %i, u: %u, l: %l }")
          .graph;
  EXPECT_EQ(g.symbols(), (std::vector<std::string>{"N"}));
  const ir::Graph bound = ir::bind(g, {{"N", 3}, {"c", 99}, {"unused", 1}});
  ir::verify(bound);
  EXPECT_TRUE(bound.symbols().empty());
  const ir::Tensors results = ir::interpret(bound, random_inputs(bound, 1));
  EXPECT_EQ(results.at("n").data, (std::vector<double>{9.0}));
  EXPECT_EQ(results.at("p").shape, (std::vector<std::int64_t>{3, 9}));
  EXPECT_EQ(results.at("i").data, (std::vector<double>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(results.at("u").shape, (std::vector<std::int64_t>{5, 6}));
  EXPECT_EQ(results.at("l").shape, (std::vector<std::int64_t>{3, 6}));
}

TEST(Bind, InSteps) {
  const ir::Graph g =
      ir::parse(
          "graph g(%x: f32[N, T - 1]) { %n = constant value(2) size(N * T) : f32[] return x: "
          "%x, n: %n }")
          .graph;
  const ir::Graph half = ir::bind(g, {{"N", 3}});
  EXPECT_EQ(half.symbols(), (std::vector<std::string>{"T"}));
  EXPECT_EQ(ir::print(ir::bind(half, {{"T", 5}})), ir::print(ir::bind(g, {{"N", 3}, {"T", 5}})));
}

TEST(Bind, RefusesWhatBecomesWrong) {
  const auto bound = [](const std::string& text, const Bindings& sizes) {
    return refusal([&] { ir::bind(ir::parse(text).graph, sizes); });
  };
  EXPECT_EQ(bound("graph g(%x: f32[T - 2]) {}", {{"T", 1}}), "the size T - 2 becomes -1");
  EXPECT_EQ(bound("graph g(%x: f32[N]) { %y = slice %x begin(0) end(M) }", {{"N", 3}, {"M", 4}}),
            "slice: dimension 0 of f32[3] is cut from 0 to 4");
  EXPECT_EQ(bound("graph g(%q: f32[1, H, 2, 2], %k: f32[1, K, 2, 2]) { %o, %l = attention %q, %k, "
                  "%k causal(0) scale(1) }",
                  {{"H", 4}, {"K", 3}}),
            "attention: the heads of q, 4, are no multiple of those of k, 3");
  EXPECT_EQ(bound("graph g(%x: f32[N * N * N]) {}", {{"N", std::int64_t{1} << 40}}),
            "a size overflows 64 bits: 1099511627776 * 1099511627776");
  const ir::Graph open = ir::parse("graph g(%x: f32[N]) { return x: %x }").graph;
  EXPECT_EQ(refusal([&] { ir::interpret(open, {}); }), "interpret: the size N is not bound");
}

// --- the builder

TEST(Builder, NamesWhatItRefuses) {
  Graph g;
  const Value x = g.parameter("x", DType::f32, {4, 6}), n = g.parameter("n", DType::i64, {4});
  const Value v = g.parameter("v", DType::f32, {6}), b = g.parameter("b", DType::bf16, {4, 6});
  const std::vector<std::pair<std::function<void()>, std::string>> table = {
      {[&] { g.parameter("x", DType::f32, {}); }, "parameter: there are two of the name 'x'"},
      {[&] { g.parameter("", DType::f32, {}); }, "parameter: no name"},
      {[&] { g.parameter("w", DType::f32, {-1}); }, "parameter: the result is f32[-1]"},
      {[&] { g.iota({4}, 1); }, "iota: axis is 1, expected 0 to 0"},
      {[&] { g.result("r", Value()); }, "result: an operand is no value of a graph"},
      {[&] { (void)(x + b); }, "add: operands are f32[4, 6] and bf16[4, 6], expected equal dtypes"},
      {[&] { (void)(x * Value()); }, "mul: an operand is no value of a graph"},
      {[&] { (void)(Value() * 2.0); }, "a number and a value: an operand is no value of a graph"},
      {[&] { apply("exp", {}); }, "exp: no operands"},
      {[&] {
         apply("exp", {x, x});
       },
       "exp: expected 1 operands, got 2"},
      {[&] { exp(n); }, "exp: operand 0 is i64[4], expected floats"},
      {[&] { select(x, x, x); }, "select: operand 0 is f32[4, 6], expected i8 (a condition)"},
      {[&] { select(less(x, x), v, n); }, "select: the operands are [4, 6] and [4]"},
      {[&] { cast(Value(), DType::f32); }, "cast: an operand is no value of a graph"},
      {[&] { reshape(x, {5}); }, "reshape: f32[4, 6] has not the elements of [5]"},
      {[&] { transpose(x, {0}); }, "transpose: dims has 1 entries for rank 2"},
      {[&] {
         broadcast(v, {4, 6}, {0});
       },
       "broadcast: dimension 0 of f32[6] goes to one of size 4"},
      {[&] { slice(x, -1, 0, 1); }, "slice: axis is -1 of [4, 6]"},
      {[&] { slice(x, 0, 3, 5); }, "slice: dimension 0 of f32[4, 6] is cut from 3 to 5"},
      {[&] { pad(x, 2, 0, 1); }, "pad: axis is 2 of [4, 6]"},
      {[&] { pad(x, 0, -1, 1); }, "pad: dimension 0 is padded by -1"},
      {[&] { concat({}, 0); }, "concat: no parts"},
      {[&] {
         concat({x, v}, 0);
       },
       "concat: operands are f32[4, 6] and f32[6]"},
      {[&] { sum(x, {2}); }, "reduce_sum: dims names dimension 2 of 2"},
      {[&] { sum(x, {}); }, "reduce_sum: dims is empty"},
      {[&] { mean(x, {2}); }, "mean: dims names dimension 2 of 2"},
      {[&] { logsumexp(n, {0}); }, "reduce_lse: operand 0 is i64[4], expected floats"},
      {[&] { matmul(x, v); }, "matmul: the operands are [4, 6] and [6]"},
      {[&] { matmul(x, x); }, "dot: dimension 1 of f32[4, 6] meets dimension 0 of f32[4, 6]"},
      {[&] { take(x, v); }, "take: operand 1 is f32[6], expected i32 or i64"},
      {[&] { scatter_add(n, v, 3); },
       "scatter_add: updates f32[6] do not begin with the shape of the index i64[4]"},
      {[&] { pick(x, n, 0); }, "pick: the index is i64[4], expected the shape [6]"},
      {[&] { attention(x, x, x, 1.0, true); },
       "attention: q is f32[4, 6] and k is f32[4, 6], expected [batch, heads, length, dim]"},
      {[&] { (void)Value().shape(); }, "a value of no graph has no shape"},
      {[&] { (void)Value().dtype(); }, "a value of no graph has no dtype"},
  };
  for (const auto& [call, message] : table) EXPECT_EQ(refusal(call), message);
  EXPECT_NO_THROW(Graph::parse(g.text()));
}

TEST(Builder, RefusesValuesOfOtherGraphs) {
  Graph g, other;
  const Value x = g.parameter("x", DType::f32, {4}), y = other.parameter("y", DType::f32, {4});
  EXPECT_EQ(refusal([&] { g.result("r", y); }), "result 'r' is a value of another graph");
  EXPECT_EQ(refusal([&] { g.gradients({y}, {x}); }), "gradients: a value is of another graph");
  EXPECT_EQ(refusal([&] { concat({x, y}, 0); }), "concat: operands are of two graphs");
}

}  // namespace
}  // namespace logitless::test

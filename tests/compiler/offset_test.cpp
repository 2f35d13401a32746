// Logits with a large common offset: losses, log-probabilities and gradients do not see it.
#include <gtest/gtest.h>

#include <cmath>

#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

// A loss of logits %z [70, V]: the sum of %d.
struct Form {
  const char* name;
  const char* text;
};
constexpr const char* kLse = " %l = reduce_lse %z dims(1)";
constexpr const char* kPick = " %p = pick %z, %t axis(1)";
const Form kForms[] = {
    {"LseLessLogit", " %d = sub %l, %p"},
    {"LogitLessLse", " %n = sub %p, %l %d = neg %n"},
    {"SumOfNegatives", " %n = neg %p %d = add %n, %l"},
    {"Masked",
     " %c = constant value(-100) : i64[70] %m = eq %t, %c %v = constant value(0) : f32[70] %u = "
     "sub %l, %p %d = select %m, %v, %u"},
    {"MaskedParts",
     " %c = constant value(-100) : i64[70] %m = eq %t, %c %v = constant value(0) : f32[70] %a = "
     "select %m, %v, %l %r = select %m, %v, %p %d = sub %a, %r"},
    {"LogSoftmax",
     " %r = broadcast %l dims(0) : f32[70, V] %q = sub %z, %r %g = pick %q, %t axis(1) %d = neg "
     "%g"},
    {"Entropy",
     " %r = broadcast %l dims(0) : f32[70, V] %q = sub %z, %r %e = exp %q %f = mul %e, %q %h = "
     "reduce_sum %f dims(1) %d = neg %h"},
};

std::string text_of(const Form& form, int vocab) {
  std::string text =
      "graph g(%x: f32[70, 24], %w: f32[V, 24], %b: f32[V], %t: i64[70]) { %dot = dot %x, %w "
      "contract(1; 1) %spread = broadcast %b dims(1) : f32[70, V] %z = add %dot, %spread";
  for (const char* part : {kLse, kPick, form.text}) text += part;
  text += " %s = reduce_sum %d dims(0) return d: %d, s: %s differentiate s wrt %x, %w, %b }";
  for (std::size_t at = 0; (at = text.find("V", at)) != std::string::npos;)
    text.replace(at, 1, std::to_string(vocab));
  return text;
}

// Hidden states and weights of whole quarters: f32 holds the logits exactly with any offset here.
ir::Tensors inputs_of(const ir::Graph& graph, double offset) {
  ir::Tensors inputs = random_inputs(graph, 5);
  for (const char* name : {"x", "w", "b"}) {
    for (double& v : inputs.at(name).data)
      v = std::round(v * (name[0] == 'w' ? 2.0 : 4.0)) / 4.0 + (name[0] == 'b' ? offset : 0.0);
  }
  const auto vocab = static_cast<double>(inputs.at("w").shape[0]);
  ir::Tensor& targets = inputs.at("t");
  for (std::size_t i = 0; i < targets.data.size(); ++i)
    targets.data[i] = std::fmod(static_cast<double>(i * 57), vocab);
  return inputs;
}

struct Case {
  std::string name;
  int vocab = 0;
  CompileOptions options;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  std::vector<Case> list = {
      {"Whole", 300, {}}, {"Chunks", 300, {}}, {"Loops", 4000, {}}, {"Head", 4000, {}}};
  list[0].options.chunk = false;
  list[1].options.chunks = 3;
  list[2].options.head_engine = false;
  for (Case& c : list) c.options.threads = 2;
  return list;
}

class Offset : public testing::TestWithParam<Case> {};

TEST_P(Offset, LeavesNoTrace) {
  for (const Form& form : kForms) {
    SCOPED_TRACE(form.name);
    const Graph graph = Graph::parse(text_of(form, GetParam().vocab));
    const CompiledProgram program = compile(graph, GetParam().options);
    // Rows that are chosen before they are subtracted have the engine's lse in f32.
    if (GetParam().name == "Head" && std::string(form.name) == "MaskedParts") continue;
    if (GetParam().name == "Head" && std::string(form.name) != "Entropy") {
      EXPECT_NE(program.explain().find("on the head engine"), std::string::npos);
    }
    const ir::Tensors wanted = execute(program, inputs_of(GraphAccess::of(graph), 0.0));
    for (const double offset : {1e4, -1e4, 1e5}) {
      SCOPED_TRACE(offset);
      const ir::Tensors found = execute(program, inputs_of(GraphAccess::of(graph), offset));
      for (const auto& [result, y] : wanted) {
        const ir::Tensor& x = found.at(result);
        double squares = 0.0, of = 0.0;
        for (std::size_t i = 0; i < y.data.size(); ++i) {
          squares += (x.data[i] - y.data[i]) * (x.data[i] - y.data[i]);
          of += y.data[i] * y.data[i];
        }
        EXPECT_LT(std::sqrt(squares / of), 1e-6) << result;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Offset, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });

// Columns are reduced by another loop than rows.
TEST(OffsetOfColumns, LeavesNoTrace) {
  const Graph graph = Graph::parse(
      "graph g(%z: f32[40, 30]) { %l = reduce_lse %z dims(0) %b = broadcast %l dims(1) : f32[40, "
      "30] %q = sub %z, %b return q: %q }");
  CompileOptions options;
  options.chunk = false;
  const CompiledProgram program = compile(graph, options);
  ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
  for (double& z : inputs.at("z").data) z = std::round(z * 64.0) / 64.0 + 1e5;
  EXPECT_LT(difference(execute(program, inputs), ir::interpret(GraphAccess::of(graph), inputs)),
            3e-7);
}

TEST(OffsetOfInfinities, StaysWhatItWas) {
  const Graph graph = Graph::parse(
      "graph g(%z: f32[3, 4], %x: f32[3]) { %l = reduce_lse %z dims(1) %d = sub %l, %x return d: "
      "%d, l: %l }");
  ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
  inputs.at("z").data[1] = INFINITY;
  for (std::size_t i = 4; i < 8; ++i) inputs.at("z").data[i] = -INFINITY;
  inputs.at("z").data[9] = NAN;
  const ir::Tensors found = execute(compile(graph, {}), inputs);
  for (const char* name : {"d", "l"}) {
    EXPECT_EQ(found.at(name).data[0], INFINITY);
    EXPECT_EQ(found.at(name).data[1], -INFINITY);
    EXPECT_TRUE(std::isnan(found.at(name).data[2]));
  }
}

std::string rewritten(ir::Graph (*pass)(const ir::Graph&), const std::string& text) {
  const ir::Graph result = pass(ir::parse(text).graph);
  ir::verify(result);
  return ir::print(result);
}

constexpr const char* kDifferences =
    "graph g(%z: f32[3, 4], %x: f32[3]) { %l = reduce_lse %z dims(1) %b = broadcast %l dims(0) : "
    "f32[3, 4] %q = sub %z, %b %d = sub %l, %x return q: %q, d: %d, l: %l }";

TEST(SplitLse, CorrectsDifferences) {
  EXPECT_EQ(rewritten(ir::split_lse, kDifferences),
            "graph g(%z: f32[3, 4], %x: f32[3]) {\n"
            "  %l = reduce_lse %z dims(1) : f64[3]\n"
            "  %1 = cast %l : f32[3]\n"
            "  %2 = cast %1 : f64[3]\n"
            "  %3 = eq %l, %2 : i8[3]\n"
            "  %4 = constant value(0) : f64[3]\n"
            "  %5 = sub %l, %2 : f64[3]\n"
            "  %6 = select %3, %4, %5 : f64[3]\n"
            "  %7 = cast %6 : f32[3]\n"
            "  %b = broadcast %1 dims(0) : f32[3, 4]\n"
            "  %9 = broadcast %7 dims(0) : f32[3, 4]\n"
            "  %q = sub %z, %b : f32[3, 4]\n"
            "  %q_1 = sub %q, %9 : f32[3, 4]\n"
            "  %d = sub %1, %x : f32[3]\n"
            "  %d_1 = add %d, %7 : f32[3]\n"
            "  return q: %q_1, d: %d_1, l: %1\n}\n");
}

// Only the rows' for a framework.
TEST(SplitLse, WidensDifferencesOfRows) {
  EXPECT_EQ(rewritten(ir::widen_lse, kDifferences),
            "graph g(%z: f32[3, 4], %x: f32[3]) {\n"
            "  %l = reduce_lse %z dims(1) : f64[3]\n"
            "  %1 = cast %l : f32[3]\n"
            "  %b = broadcast %1 dims(0) : f32[3, 4]\n"
            "  %q = sub %z, %b : f32[3, 4]\n"
            "  %4 = cast %x : f64[3]\n"
            "  %d = sub %l, %4 : f64[3]\n"
            "  %6 = cast %d : f32[3]\n"
            "  return q: %q, d: %6, l: %1\n}\n");
}

TEST(SplitLse, LeavesWhatNoDifferenceReads) {
  const std::string text =
      "graph g(%z: f32[3, 4], %y: f64[3, 4]) { %l = reduce_lse %z dims(1) %q = mul %l, %l %m = "
      "reduce_lse %y dims(1) %n = reduce_max %y dims(1) %d = sub %m, %n return q: %q, d: %d }";
  for (const auto pass : {ir::split_lse, ir::widen_lse})
    EXPECT_EQ(rewritten(pass, text), ir::print(ir::parse(text).graph));
}

}  // namespace
}  // namespace logitless::test

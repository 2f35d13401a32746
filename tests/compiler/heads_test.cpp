// Heads that the compiler gives to the head engine: which ones, and equal results.
#include <gtest/gtest.h>

#include <cmath>

#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/run.h"
#include "core/half.h"
#include "logitless/error.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

// A head of 70 tokens and 4000 vocabulary entries, just above the least size.
constexpr const char* kPlain = "%z = dot %x, %w contract(1; 1) : f32[70, 4000]";
constexpr const char* kLoss =
    " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %s = reduce_sum %d "
    "dims(0) return s: %s";

struct Case {
  std::string name;
  std::string text;
  int operations = 1;    // `head` in the compiled program
  bool ignored = false;  // rows without a target are skipped
  bool sixteen_bit = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::string f32(const std::string& body, const std::string& more = "") {
  return "graph g(%x: f32[70, 24], %w: f32[4000, 24], %t: i64[70]" + more + ") { " + body + " }";
}

std::vector<Case> cases() {
  const std::string plain = kPlain, loss = kLoss;
  const std::string grad = " differentiate s wrt %x, %w";
  std::vector<Case> list;
  list.push_back({"Plain", f32(plain + loss + grad)});
  list.push_back({"ForwardOnly", f32(plain + loss)});
  list.push_back({"FrozenWeight", f32(plain + loss + " differentiate s wrt %x")});
  list.push_back({"FrozenHidden", f32(plain + loss + " differentiate s wrt %w")});
  list.push_back(
      {"LossesWithCotangents",
       f32(plain + " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p "
                   "return d: %d, l: %l differentiate d by %g, l by %h wrt %x, %w",
           ", %g: f32[70], %h: f32[70]")});
  list.push_back(
      {"LogSoftmax",
       f32(plain +
           " %l = reduce_lse %z dims(1) %b = broadcast %l dims(0) : f32[70, 4000] %q = "
           "sub %z, %b %p = pick %q, %t axis(1) %s = reduce_sum %p dims(0) return s: %s" +
           grad)});
  list.push_back(
      {"SettledLogSoftmax",
       f32(plain +
           " %l = reduce_lse %z dims(1) %a = abs %l %far = constant value(inf) : f32[70] %f = lt "
           "%a, %far %none = constant value(nan) : f32[70] %g = select %f, %l, %none %b = "
           "broadcast %g dims(0) : f32[70, 4000] %q = sub %z, %b %p = pick %q, %t axis(1) %s = "
           "reduce_sum %p dims(0) return s: %s")});
  list.push_back(
      {"Masked",
       f32(plain +
           " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %c = constant "
           "value(-100) : i64[70] %m = eq %t, %c %o = constant value(0) : f32[70] %e = select %m, "
           "%o, %d %s = reduce_sum %e dims(0) return s: %s" +
           grad),
       1, true});
  // The gradient of lse depends on lse, so a forward comes first, and the gradients run it again.
  list.push_back({"ZLoss",
                  f32(plain +
                      " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %q = "
                      "mul %l, %l %e = add %d, %q %s = reduce_sum %e dims(0) return s: %s" +
                      grad),
                  2});
  list.push_back(
      {"ScaleAndSoftcap",
       f32("%y = dot %x, %w contract(1; 1) %k = constant value(0.5) : f32[70, 4000] %u = "
           "mul %y, %k %c = constant value(3) : f32[70, 4000] %v = div %u, %c %h = tanh "
           "%v %z = mul %h, %c" +
           loss + grad)});
  list.push_back(
      {"SoftcapByItsInverse",
       f32("%y = dot %x, %w contract(1; 1) %k = constant value(0.5) : f32[70, 4000] %v = "
           "mul %y, %k %h = tanh %v %c = constant value(2) : f32[70, 4000] %z = mul %h, "
           "%c" +
           loss + grad)});
  list.push_back({"Temperature",
                  f32("%y = dot %x, %w contract(1; 1) %k = constant value(4) : f32[70, 4000] %z = "
                      "div %y, %k" +
                      loss + grad)});
  list.push_back(
      {"Bias", f32("%y = dot %x, %w contract(1; 1) %a = broadcast %b dims(1) : f32[70, 4000] %z "
                   "= add %y, %a" +
                       loss + " differentiate s wrt %x, %w, %b",
                   ", %b: f32[4000]")});
  list.push_back(
      {"Sequences",
       "graph g(%x: f32[2, 35, 24], %w: f32[4000, 24], %t: i64[2, 35]) { %z = dot %x, %w "
       "contract(2; 1) %l = reduce_lse %z dims(2) %p = pick %z, %t axis(2) %d = sub %l, %p %s = "
       "reduce_sum %d dims(0, 1) return s: %s differentiate s wrt %x, %w }"});
  list.push_back(
      {"TiedTable", "graph g(%i: i64[70], %w: f32[4000, 24], %t: i64[70]) { %x = take %w, %i " +
                        plain + loss + " differentiate s wrt %w }"});
  list.push_back(
      {"TwoHeads",
       f32(plain + " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p "
                   "%y = dot %x, %v contract(1; 1) %k = reduce_lse %y dims(1) %n = pick "
                   "%y, %t axis(1) %e = sub %k, %n %f = add %d, %e %s = reduce_sum %f "
                   "dims(0) return s: %s differentiate s wrt %x, %w, %v",
           ", %v: f32[5000, 24]"),
       2});
  list.push_back({"Bf16WithF32Gradients",
                  "graph g(%x: bf16[70, 24], %m: f32[4000, 24], %t: i64[70]) { %w = cast %m : "
                  "bf16[4000, 24] " +
                      plain + loss + " differentiate s wrt %x, %m }",
                  1, false, true});
  return list;
}

// Heads whose operands are one value, or computed from one: hidden states against each other.
std::vector<Case> aliased_cases() {
  struct Sides {
    const char *name, *text, *x, *w;
    bool sixteen_bit = false;
  };
  const std::string norms =
      "%q = mul %h, %h %o = reduce_sum %q dims(1) %r = rsqrt %o %j = broadcast %r dims(0) : "
      "f32[700, 24] %n = mul %h, %j ";
  const Sides sides[] = {
      {"Same", "", "%h", "%h"},
      {"Normalised", norms.c_str(), "%n", "%n"},
      {"NormalisedOneSide", norms.c_str(), "%n", "%h"},
      {"Concatenated",
       "%a = slice %h begin(0, 0) end(350, 24) %c = slice %h begin(350, 0) end(700, 24) %k = "
       "concat %c, %a axis(0) ",
       "%k", "%k"},
      {"Transposed", "%k = transpose %h dims(1, 0) %i = transpose %k dims(1, 0) ", "%i", "%i"},
      {"Flipped", "%k = flip %h axis(0) ", "%h", "%k"},
      {"SliceAndWhole", "%a = slice %h begin(0, 0) end(350, 24) %k = concat %a, %a axis(0) ", "%k",
       "%h"},
      {"DetachedRight", "%k = stop_gradient %h ", "%h", "%k"},
      {"DetachedLeft", "%k = stop_gradient %h ", "%k", "%h"},
      {"Cast", "%k = cast %h : bf16[700, 24] ", "%k", "%k", true},
  };
  const std::string lse = " %l = reduce_lse %z dims(1)", pick = " %p = pick %z, %t axis(1)";
  const std::string mean = " %s = reduce_sum %d dims(0) return s: %s differentiate s wrt %h";
  const std::string plain = lse + pick + " %d = sub %l, %p" + mean;
  std::vector<Case> list;
  const auto add = [&](const Sides& side, const std::string& name, const std::string& logits,
                       const std::string& loss, int operations = 1, bool ignored = false,
                       const std::string& more = "") {
    list.push_back({std::string("Aliased") + side.name + name,
                    "graph g(%h: f32[700, 24], %t: i64[700]" + more + ") { " + side.text +
                        "%y = dot " + side.x + ", " + side.w + " contract(1; 1) : f32[700, 700] " +
                        logits + loss + " }",
                    operations, ignored, side.sixteen_bit});
  };
  const auto number = [](const char* name, const char* value) {
    return std::string(name) + " = constant value(" + value + ") : f32[700, 700] ";
  };
  const std::string scaled = number("%e", "0.1") + "%z = mul %y, %e";
  for (const Sides& side : sides) add(side, "", scaled, plain);
  const Sides& same = sides[0];
  add(same, "Bias", "%f = broadcast %b dims(1) : f32[700, 700] %z = add %y, %f", plain + ", %b", 1,
      false, ", %b: f32[700]");
  add(same, "BiasOfItself",
      "%g = reduce_sum %h dims(1) %f = broadcast %g dims(1) : f32[700, 700] %z = add %y, %f",
      plain);
  add(same, "Softcap", number("%e", "3") + "%f = div %y, %e %g = tanh %f %z = mul %g, %e", plain);
  add(same, "ZLoss", scaled, lse + pick + " %u = sub %l, %p %m = mul %l, %l %d = add %u, %m" + mean,
      2);
  add(same, "Masked", scaled,
      lse + pick +
          " %u = sub %l, %p %i = constant value(-100) : i64[700] %m = eq %t, %i %v = constant "
          "value(0) : f32[700] %d = select %m, %v, %u" +
          mean,
      1, true);
  add(same, "LogSoftmax", scaled,
      lse +
          " %u = broadcast %l dims(0) : f32[700, 700] %v = sub %z, %u %p = pick %v, %t axis(1) %d "
          "= neg %p" +
          mean);
  return list;
}

ir::Tensors inputs_of(const ir::Graph& graph) {
  ir::Tensors inputs = random_inputs(graph, 5);
  const char* const weights = inputs.contains("w") ? "w" : inputs.contains("m") ? "m" : "h";
  const double vocab = static_cast<double>(inputs.at(weights).shape[0]);
  ir::Tensor& targets = inputs.at("t");
  for (std::size_t i = 0; i < targets.data.size(); ++i)
    targets.data[i] = i % 7 == 3    ? -100.0
                      : i % 11 == 5 ? vocab
                                    : std::fmod(static_cast<double>(i * 57), vocab);
  if (!inputs.contains("w") && inputs.contains("m")) {  // rounded as the program reads them
    for (double& x : inputs.at("m").data) x = bf16_to_float(float_to_bf16(static_cast<float>(x)));
  }
  return inputs;
}

// Returns the program with fewer tokens and vocabulary entries, for the interpreter.
std::string small(std::string text) {
  for (const auto& [from, to] :
       {std::pair{"70", "14"}, {"35", "7"}, {"4000", "90"}, {"5000", "60"}}) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos;)
      text.replace(at, std::string_view(from).size(), to);
  }
  return text;
}

class Heads : public testing::TestWithParam<Case> {};

TEST_P(Heads, MeanTheSame) {
  const Case& c = GetParam();
  const Graph source = Graph::parse(small(c.text));
  const ir::Graph& graph = GraphAccess::of(source);
  const ir::Tensors inputs = inputs_of(graph);
  const ir::Graph plain = ir::drop_settling(ir::widen_sums(ir::eliminate_common(graph)));
  const ir::Graph lowered = ir::lower_heads(plain, 0, /*least_logits=*/1);
  ir::verify(lowered);
  int operations = 0;
  for (const ir::Node& n : lowered.nodes()) {
    EXPECT_FALSE(n.op == ir::Op::dot) << ir::print(lowered);
    if (n.op != ir::Op::head) continue;
    ++operations;
    EXPECT_EQ(n.attributes->head.ignored.has_value(), c.ignored) << ir::print(lowered);
  }
  EXPECT_EQ(operations, c.operations) << ir::print(lowered);
  EXPECT_LT(difference(ir::interpret(lowered, inputs), ir::interpret(graph, inputs)), 1e-12)
      << ir::print(lowered);
  EXPECT_EQ(ir::print(ir::parse(ir::print(lowered)).graph), ir::print(lowered));
}

// Returns the largest relative error of a result in the 2-norm.
double error(const ir::Tensors& a, const ir::Tensors& b) {
  double worst = 0.0;
  for (const auto& [name, y] : b) {
    const ir::Tensor& x = a.at(name);
    double squares = 0.0, of = 1e-300;
    for (std::size_t i = 0; i < y.data.size(); ++i) {
      squares += (x.data[i] - y.data[i]) * (x.data[i] - y.data[i]);
      of += y.data[i] * y.data[i];
    }
    worst = std::max(worst, std::isnan(squares) ? HUGE_VAL : std::sqrt(squares / of));
  }
  return worst;
}

TEST_P(Heads, RunOnTheEngine) {
  const Case& c = GetParam();
  const Graph source = Graph::parse(c.text);
  const ir::Tensors inputs = inputs_of(GraphAccess::of(source));
  CompileOptions options;
  options.threads = 1;
  const CompiledProgram compiled = compile(source, options);
  EXPECT_NE(compiled.explain().find("on the head engine"), std::string::npos);
  const ir::Tensors results = execute(compiled, inputs);
  // Running the unmodified fp32 program is as good a reference as the interpreter.
  options.chunk = false;
  if (!c.sixteen_bit) {
    EXPECT_LT(error(results, execute(compile(source, options), inputs)), 1e-5);
  } else if (!kThreadSanitizer) {  // it sees nothing in the interpreter, which has one thread
    EXPECT_LT(error(results, ir::interpret(GraphAccess::of(source), inputs)), 4e-3);
  }
  options.chunk = true;
  options.threads = 3;
  EXPECT_EQ(difference(execute(compile(source, options), inputs), results), 0.0);
}

INSTANTIATE_TEST_SUITE_P(Aliased, Heads, testing::ValuesIn(aliased_cases()),
                         [](const auto& c) { return c.param.name; });
INSTANTIATE_TEST_SUITE_P(All, Heads, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });

bool lowers(const std::string& text, const CompileOptions& options = {}) {
  const std::string explain = compile(Graph::parse(text), options).explain();
  return explain.find("on the head engine") != std::string::npos;
}

TEST(HeadsLeftAlone, WhereAnythingElseReadsTheLogits) {
  const std::string plain = kPlain, loss = kLoss;
  const std::string grad = " differentiate s wrt %x, %w";
  EXPECT_TRUE(lowers(f32(plain + loss + grad)));
  EXPECT_FALSE(lowers(f32(plain + loss + ", z: %z" + grad)));
  EXPECT_FALSE(lowers(f32(plain + " %a = argmax %z dims(1)" + loss + ", a: %a" + grad)));
  // A penalty on the logits adds a part to their gradient that the engine does not know.
  EXPECT_FALSE(lowers(f32(plain +
                          " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %q "
                          "= mul %z, %z %r = reduce_sum %q dims(1) %e = add %d, %r %s = reduce_sum "
                          "%e dims(0) return s: %s" +
                          grad)));
}

// Labels of self-training, and rows that their probabilities leave out.
TEST(HeadsLeftAlone, WhereTheLogitsDecideTargets) {
  const std::string begin = "graph g(%x: f32[70, 24], %w: f32[4000, 24], %t: i64[70]) { " +
                            std::string(kPlain) + " %l = reduce_lse %z dims(1) ";
  const std::string of_lse = " %n = cast %l : i64[70] %y = add %t, %n %p = pick %z, %y axis(1)";
  const std::string mean =
      " %d = sub %l, %p %s = reduce_sum %d dims(0) return s: %s differentiate s wrt %x, %w }";
  EXPECT_FALSE(lowers(begin + of_lse + mean));
  // Rows are left out after the operation.
  const std::string masked =
      " %p = pick %z, %t axis(1) %u = sub %l, %p %c = constant value(9) : f32[70] %m = lt %l, %c "
      "%o = constant value(0) : f32[70] %d = select %m, %u, %o %s = reduce_sum %d dims(0) return "
      "s: %s differentiate s wrt %x, %w }";
  EXPECT_TRUE(lowers(begin + masked));
}

TEST(HeadsLeftAlone, OfOtherDtypesAndSmallOnes) {
  const auto text = [](const std::string& dtype, int vocab) {
    const std::string v = std::to_string(vocab);
    return "graph g(%x: " + dtype + "[70, 24], %w: " + dtype + "[" + v +
           ", 24], %t: i64[70]) { %z = dot %x, %w contract(1; 1) : " + dtype + "[70, " + v + "]" +
           kLoss + " differentiate s wrt %x, %w }";
  };
  EXPECT_TRUE(lowers(text("f32", 4000)));
  EXPECT_FALSE(lowers(text("f32", 3000)));
  EXPECT_FALSE(lowers(text("f64", 4000)));
  EXPECT_FALSE(lowers(text("bf16", 40000)));  // its logits are rounded to bf16
}

TEST(HeadsLeftAlone, WhenLoopsAreAskedFor) {
  const std::string text = f32(std::string(kPlain) + kLoss + " differentiate s wrt %x, %w");
  CompileOptions options;
  options.head_engine = false;
  EXPECT_FALSE(lowers(text, options));
  options.head_engine = true;
  options.chunks = 4;
  EXPECT_FALSE(lowers(text, options));
  options.chunks = 0;
  options.chunk = false;
  EXPECT_FALSE(lowers(text, options));
}

// The engine's gradient is an operand of products that may get loops. The hidden states come from a
// concatenation along the summed dimension.
TEST(HeadsBesideProducts, OfConcatenations) {
  const Graph source = Graph::parse(
      "graph g(%h: f32[72, 24], %m: f32[48, 24], %w: f32[4000, 24], %t: i64[72]) { %f = flip %h "
      "axis(0) %c = concat %h, %f axis(1) %x = dot %c, %m contract(1; 0) %z = dot %x, %w "
      "contract(1; 1)" +
      std::string(kLoss) + " differentiate s wrt %h, %m, %w }");
  const ir::Tensors inputs = inputs_of(GraphAccess::of(source));
  CompileOptions options;
  options.threads = 1;
  const CompiledProgram compiled = compile(source, options);
  EXPECT_NE(compiled.explain().find("on the head engine"), std::string::npos);
  options.chunk = false;
  EXPECT_LT(error(execute(compiled, inputs), execute(compile(source, options), inputs)), 1e-5);
}

TEST(HeadsBudget, IsKept) {
  const Graph source = Graph::parse(
      "graph g(%x: f32[700, 24], %w: f32[20000, 24], %t: i64[700]) { %z = dot %x, %w contract(1; "
      "1)" +
      std::string(kLoss) + " differentiate s wrt %x, %w }");
  const ir::Tensors inputs = inputs_of(GraphAccess::of(source));
  CompileOptions options;
  options.threads = 1;
  const ir::Tensors wanted = execute(compile(source, options), inputs);
  std::size_t last = compile(source, options).arena_bytes();
  options.strict = true;
  for (const std::size_t budget : {3_MiB, 2_MiB}) {
    options.memory_budget = budget;
    const CompiledProgram compiled = compile(source, options);
    EXPECT_LE(compiled.arena_bytes(), std::min(last, budget)) << compiled.explain();
    last = compiled.arena_bytes();
    EXPECT_LT(error(execute(compiled, inputs), wanted), 1e-5);
  }
}

TEST(HeadsText, NamesWhatIsWrong) {
  const auto error = [](const std::string& body) {
    try {
      ir::parse("graph g(%x: f32[4, 8], %w: f32[9, 8], %t: i64[4], %d: f32[4]) {\n" + body + " }");
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  const std::string plain = " bias(0) scale(1) softcap(0) workspace(0)";
  EXPECT_EQ(error("%a, %b = head %x, %w, %t" + plain), "accepted");
  EXPECT_NE(error("%a, %b = head %x, %w" + plain).find("head"), std::string::npos);
  EXPECT_NE(error("%a, %b = head %w, %x, %t" + plain).find("targets are i64[4]"),
            std::string::npos);
  EXPECT_NE(error("%a, %b, %c = head %x, %w, %t, %d, %d gradients(f16, none, none)" + plain)
                .find("d_x is f16, expected f32 or f32"),
            std::string::npos);
  EXPECT_NE(error("%a, %b = head %x, %w, %t, %d, %d gradients(none, none, i8)" + plain)
                .find("expected f32, bf16, f16 or none, got 'i8'"),
            std::string::npos);
}

// Programs without a head follow the variable, too: matrix products and vectors.
TEST(Compile, RefusesAKernelThatThereIsNot) {
  const Graph graph = Graph::parse("graph g(%x: f32[2, 3]) { %y = exp %x return y: %y }");
  setenv("LOGITLESS_CPU", "slide_rule", 1);
  std::string message = "accepted";
  try {
    compile(graph, {});
  } catch (const InvalidArgument& error) {
    message = error.what();
  }
  unsetenv("LOGITLESS_CPU");
  EXPECT_EQ(message.rfind("LOGITLESS_CPU: 'slide_rule' is unknown; expected one of ", 0), 0u)
      << message;
}

}  // namespace
}  // namespace logitless::test

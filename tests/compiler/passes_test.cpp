// Passes as text before and after, and the chunker's decisions.
#include "compiler/passes/passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <set>
#include <string>

#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/passes/narrow_operands.h"
#include "compiler/programs.h"
#include "compiler/run.h"
#include "logitless/error.h"

namespace logitless::test {
namespace {

void expect_rewritten(ir::Graph (*pass)(const ir::Graph&), const std::string& before,
                      const std::string& after) {
  const ir::Graph result = pass(ir::parse(before).graph);
  ir::verify(result);
  EXPECT_EQ(ir::print(result), ir::print(ir::parse(after).graph));
}

TEST(WidenSums, KeepsTheSum) {
  expect_rewritten(ir::widen_sums,
                   "graph g(%x: bf16[4, 8], %y: bf16[4, 6]) { %d = dot %x, %y contract(0; 0) %t = "
                   "transpose %d dims(1, 0) %w = cast %t : f32[6, 8] return w: %w }",
                   "graph g(%x: bf16[4, 8], %y: bf16[4, 6]) { %d = dot %x, %y contract(0; 0) : "
                   "f32[8, 6] %t = transpose %d dims(1, 0) return w: %t }");
}

TEST(WidenSums, LeavesWhatIsReadTwice) {
  const std::string text =
      "graph g(%x: bf16[4, 8], %y: bf16[4, 6]) { %d = dot %x, %y contract(0; 0) %w = cast %d : "
      "f32[8, 6] return w: %w, d: %d }";
  expect_rewritten(ir::widen_sums, text, text);
}

// A loop reads the later one of two equal values first.
TEST(EliminateCommonOfLoops, LeavesOneOfEqualOperands) {
  const auto program = [](const std::string& values, const std::string& whole) {
    return "graph g(%x: f32[8, 4]) { " + values +
           "%l = loop c0 extent(8) chunk(2) (%first, %in0 = whole " + whole +
           ", %in1 = slice %a axis(0) factor(1)) { %z = dot %in1, %in0 contract(1; 1) : "
           "f32[c0, 8] return out0: stack %z axis(0) factor(1) } return l: %l }";
  };
  const std::string once = "%a = exp %x ";
  const ir::Graph merged =
      ir::eliminate_common_of_loops(ir::parse(program(once + "%b = exp %x ", "%b")).graph);
  EXPECT_EQ(ir::print(merged), ir::print(ir::parse(program(once, "%a")).graph));
}

TEST(NarrowOperands, MultipliesWidenedValuesAsTheyAre) {
  const std::string begin = "graph g(%x: bf16[4, 8], %y: bf16[6, 8], %h: f16[6, 8]) { ";
  const std::string product = "%d = dot %a, %b contract(1; 1) return d: %d }";
  const std::string widened = "%a = cast %x : f32[4, 8] %b = cast %y : f32[6, 8] ";
  expect_rewritten(ir::narrow_operands, begin + widened + product,
                   begin + "%d = dot %x, %y contract(1; 1) : f32[4, 6] return d: %d }");
  const std::string doubled =
      "%b = cast %y : f32[6, 8] %w = cast %x : f32[4, 8] %f = constant value(";
  const std::string times = ") : f32[4, 8] %a = mul %f, %w ";
  expect_rewritten(ir::narrow_operands, begin + doubled + "-2" + times + product,
                   begin +
                       "%0 = constant value(-2) : bf16[4, 8] %1 = mul %x, %0 %d = dot %1, %y "
                       "contract(1; 1) : f32[4, 6] return d: %d }");
  // Thirds and halves are rounded, and two dtypes have no product.
  for (const char* factor : {"0.3", "0.5"}) {
    const std::string text = begin + doubled + factor + times + product;
    expect_rewritten(ir::narrow_operands, text, text);
  }
  // 2^200 is no number of bf16, though two factors of 2^100 are.
  const std::string twice = begin + "%b = cast %y : f32[6, 8] %w = cast %x : f32[4, 8] " +
                            "%f = constant value(-1.2676506002282294e30) : f32[4, 8] " +
                            "%o = constant value(1.2676506002282294e30) : f32[4, 8] " +
                            "%v = mul %o, %w %a = mul %f, %v " + product;
  expect_rewritten(ir::narrow_operands, twice, twice);
  const std::string mixed = begin + "%a = cast %x : f32[4, 8] %b = cast %h : f32[6, 8] " + product;
  expect_rewritten(ir::narrow_operands, mixed, mixed);
}

TEST(LiftTransposes, MakesAOneHotTensorInTheNewOrder) {
  const std::string before = R"(graph g(%t: i64[3, 4], %x: f32[3, 5, 4]) {
  %b = broadcast %t dims(0, 1) : i64[3, 4, 5]
  %i = iota axis(2) : i64[3, 4, 5]
  %e = eq %i, %b
  %one = constant value(1) : f32[3, 4, 5]
  %none = constant value(0) : f32[3, 4, 5]
  %s = select %e, %one, %none
  %p = transpose %s dims(0, 2, 1)
  %m = mul %p, %x
  return m: %m
})";
  const ir::Graph graph = ir::parse(before).graph, lifted = ir::lift_transposes(graph);
  ir::verify(lifted);
  EXPECT_EQ(ir::print(ir::eliminate_dead(lifted)),
            ir::print(ir::parse(R"(graph g(%t: i64[3, 4], %x: f32[3, 5, 4]) {
  %i = iota axis(1) : i64[3, 5, 4]
  %b = broadcast %t dims(0, 2) : i64[3, 5, 4]
  %e = eq %i, %b
  %one = constant value(1) : f32[3, 5, 4]
  %none = constant value(0) : f32[3, 5, 4]
  %s = select %e, %one, %none
  %m = mul %s, %x
  return m: %m
})")
                          .graph));
  const ir::Tensors inputs = random_inputs(graph, 1);
  EXPECT_EQ(difference(ir::interpret(lifted, inputs), ir::interpret(graph, inputs)), 0.0);
}

TEST(LiftTransposes, LeavesValuesInMemory) {
  for (const std::string statement :
       {"%e = exp %x %p = transpose %e dims(1, 0)", "%p = transpose %x dims(1, 0)",
        // Broadcasts have ascending dimensions.
        "%b = broadcast %x dims(0, 1) : f32[3, 4, 5] %e = exp %b %q = transpose %e dims(1, 0, 2) "
        "%p = reduce_sum %q dims(2)"}) {
    const std::string text = "graph g(%x: f32[3, 4]) { " + statement + " return p: %p }";
    expect_rewritten(ir::lift_transposes, text, text);
  }
}

TEST(EliminateCommon, TellsNumbersApart) {
  expect_rewritten(ir::eliminate_common,
                   "graph g(%x: f32[2]) { %a = exp %x %b = exp %x %c = constant value(0) : f32[2] "
                   "%d = constant value(-0) : f32[2] %s = add %a, %b %t = mul %c, "
                   "%d %u = add %s, %t %dead = log %x return u: %u }",
                   "graph g(%x: f32[2]) { %a = exp %x %c = constant value(0) : f32[2] %d = "
                   "constant value(-0) : f32[2] %s = add %a, %a %t = mul %c, %d %u = add %s, "
                   "%t return u: %u }");
}

// Heads of the same operands are merged only if all their attributes agree.
TEST(EliminateCommon, TellsHeadsApart) {
  const std::string start = "graph g(%h: f32[4, 8], %w: f32[16, 8], %t: i64[4]) { ";
  const auto head = [](const std::string& options) { return "head %h, %w, %t " + options + " "; };
  const std::string plain = head("bias(0) scale(1) softcap(0) workspace(0)");
  const auto two = [&](const std::string& first, const std::string& second) {
    return start + "%a, %x = " + first + "%b, %y = " + second + "%s = add %a, %b return s: %s }";
  };
  EXPECT_EQ(ir::eliminate_common(ir::parse(two(plain, plain)).graph).size() + 1,
            ir::parse(two(plain, plain)).graph.size());
  for (const char* options :
       {"bias(0) scale(1) softcap(30) workspace(0)", "bias(0) scale(2) softcap(0) workspace(0)",
        "bias(0) scale(1) softcap(0) ignored(-1) workspace(0)"}) {
    expect_rewritten(ir::eliminate_common, two(plain, head(options)), two(plain, head(options)));
  }
  // Both results have one type, but are gradients of x and of w.
  const std::string gradients =
      "graph g(%x: f32[8, 3], %w: f32[8, 3], %t: i64[8], %a: f32[8], %b: f32[8]) { "
      "%l, %z, %dx = head %x, %w, %t, %a, %b bias(0) scale(1) softcap(0) "
      "gradients(f32, none, none) workspace(0) "
      "%m, %y, %dw = head %x, %w, %t, %a, %b bias(0) scale(1) softcap(0) "
      "gradients(none, f32, none) workspace(0) return dx: %dx, dw: %dw }";
  expect_rewritten(ir::eliminate_common, gradients, gradients);
}

// Returns the names of the nodes that may be off in their last bits.
std::set<std::string> near_in(const std::string& text) {
  const ir::Graph graph = ir::mark_near_results(ir::parse(text).graph);
  std::set<std::string> names;
  for (const ir::Node& n : graph.nodes()) {
    if (n.attributes->near) names.insert(n.name);
  }
  return names;
}

TEST(NearResults, NotWhereAFunctionJumps) {
  const std::string begin =
      "graph g(%x: f32[4, 8], %t: f32[4, 8], %h: bf16[4, 8]) { %a = div %x, %t ";
  const std::set<std::string> none, a = {"a"};
  EXPECT_EQ(near_in(begin + "return a: %a }"), a);
  EXPECT_EQ(near_in(begin + "%e = exp %a return e: %e }"), a);
  EXPECT_EQ(
      near_in(begin +
              "%l = reduce_lse %a dims(1) %p = dot %a, %x contract(1; 1) return l: %l, p: %p }"),
      a);
  EXPECT_EQ(near_in(begin + "%f = floor %a return f: %f }"), none);
  EXPECT_EQ(near_in(begin + "%s = sub %a, %x %b = gt %s, %t return b: %b }"), none);
  EXPECT_EQ(near_in(begin + "%r = transpose %a dims(1, 0) %i = argmax %r dims(0) return i: %i }"),
            none);
  EXPECT_EQ(near_in(begin + "%i = cast %a : i64[4, 8] return i: %i }"), none);
  // An exponential rounds by itself, so that a comparison behind it asks for nothing.
  EXPECT_EQ(near_in(begin + "%e = exp %a %b = gt %e, %t return b: %b }"), a);
  // Sixteen bits hide the error.
  EXPECT_EQ(
      near_in(
          begin +
          "%d = div %h, %h %f = floor %d %g = floor %a %q = sqrt %x return f: %f, g: %g, q: %q }"),
      (std::set<std::string>{"d", "q"}));
}

TEST(NearResults, CopiesKeepTheMark) {
  const ir::Graph graph = ir::mark_near_results(
      ir::parse("graph g(%x: f32[4, 8], %t: f32[4, 8]) { %a = div %x, %t %e = exp %a %s = "
                "reduce_sum %e dims(1) "
                "%b = broadcast %s dims(0) : f32[4, 8] %m = mul %b, %a return m: %m }")
          .graph);
  int divisions = 0;
  const ir::Graph again = ir::recompute_cheap(graph);
  for (const ir::Node& n : again.nodes()) {
    if (n.op != ir::Op::map || n.attributes->function != ir::Function::div) continue;
    ++divisions;
    EXPECT_TRUE(n.attributes->near);
  }
  EXPECT_GE(divisions, 1);
}

TEST(RecomputeCheap, KeepsOneOfTwo) {
  // %x and its exponential are both read after the peak, so the exponential is recomputed.
  const std::string head = "graph g(%w: f32[64, 64]) { %x = dot %w, %w contract(1; 0) %e = exp %x ";
  const std::string peak =
      "%p = dot %e, %e contract(; ) %l = reduce_sum %p dims(0, 1, 2, 3) %b = broadcast %l dims() : "
      "f32[64, 64] ";
  expect_rewritten(ir::recompute_cheap,
                   head + peak + "%q = mul %e, %b %s = mul %q, %x return s: %s }",
                   head + peak + "%e_1 = exp %x %q = mul %e_1, %b %s = mul %q, %x return s: %s }");
  // If only the exponential is read, it is stored: recomputing it would store %x instead.
  const std::string alone = head + peak + "%q = mul %e, %b return q: %q }";
  expect_rewritten(ir::recompute_cheap, alone, alone);
}

const NamedProgram& program(const std::string& name) {
  for (const NamedProgram& p : programs()) {
    if (p.name == name) return p;
  }
  throw std::out_of_range(name);
}

std::string explained(const std::string& name, CompileOptions options = {}) {
  options.sizes = program(name).sizes;
  if (options.memory_budget == 0) options.memory_budget = 64 << 10;
  return compile(program(name).make(DType::f32), options).explain();
}

TEST(Phases, OneWhereTheCotangentIsAFactor) {
  const std::string text = explained("squared");
  EXPECT_NE(text.find(", 1 phase;"), std::string::npos) << text;
  EXPECT_NE(text.find("upstream gradient of 1"), std::string::npos) << text;
}

TEST(Phases, TwoWhereAllChunksAreWaitedFor) {
  for (const char* name : {"clip", "few_rows"}) {
    const std::string text = explained(name);
    EXPECT_NE(text.find(", 2 phases;"), std::string::npos) << text;
  }
}

TEST(Phases, NothingIsComputedTwiceWithoutABudget) {
  for (const NamedProgram& p : programs()) {
    CompileOptions options;
    options.sizes = p.sizes;
    const CompiledProgram compiled = compile(p.make(DType::f32), options);
    EXPECT_EQ(compiled.explain().find("% more than without loops"), std::string::npos)
        << compiled.explain();
  }
}

TEST(Boundaries, AreReportedAndStrictRefusesThem) {
  // The logits are concatenated with themselves in both dimensions: full there, chunked elsewhere.
  const std::string text =
      "graph g(%x: f32[600, 8], %w: f32[400, 8], %v: f32[400, 8], %t: i64[600]) { %z = dot %x, %w "
      "contract(1; 1) %zz = "
      "concat %z, %z axis(0) %zzz = concat %zz, %zz axis(1) %l = reduce_lse %zzz dims(1) %y = dot "
      "%x, %v contract(1; 1) %e = exp "
      "%y %u = mul %e, %z %p = "
      "reduce_sum %u dims(1) %m = reduce_sum %p dims(0) %n = reduce_sum %l dims(0) %q = add %m, %n "
      "return q: %q }";
  CompileOptions options;
  options.memory_budget = 1;
  const std::string explain = compile(Graph::parse(text), options).explain();
  EXPECT_NE(explain.find("boundary: zz (concat) f32[1200, 400] cannot be cut along dimension 0"),
            std::string::npos)
      << explain;
  options.memory_budget = 0;
  options.strict = true;
  try {
    compile(Graph::parse(text), options);
    ADD_FAILURE() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("strict: zz (concat)"), std::string::npos)
        << error.what();
  }
}

TEST(Fusion, OfLongChainsFitsTheRegisters) {
  // One loop has values with many readers, more than its registers hold.
  std::string text = "graph g(%x: f32[64, 8], %y: f32[64, 8]) { %v0 = exp %x ";
  constexpr int kSteps = 300;
  for (int i = 1; i <= kSteps; ++i) {
    const std::string before = " %v" + std::to_string(i - 1);
    const std::string other = i % 2 == 0 ? ", %v" + std::to_string(i / 2) : ", %y";
    text += "%v" + std::to_string(i) + " = " +
            (i % 3 == 0   ? "tanh" + before
             : i % 3 == 1 ? "sub" + before + other
                          : "max" + before + other) +
            " ";
  }
  text += "%r = reduce_lse %v300 dims(1) return r: %r differentiate r wrt %x, %y }";
  const Graph graph = Graph::parse(text);
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
  EXPECT_LT(
      difference(execute(compile(graph), inputs), ir::interpret(GraphAccess::of(graph), inputs)),
      1e-3);
}

// Rounding a loop's log-sum-exp to fp32 leaves a rest.
TEST(Chunks, CastsOfTheProgramRound) {
  const Graph graph = Graph::parse(
      "graph g(%x: f32[1, 4], %w: f32[9000, 4]) { %z = dot %x, %w contract(1; 1) "
      "%lse = reduce_lse %z dims(1) : f64[1] %high = cast %lse : f32[1] "
      "%back = cast %high : f64[1] %rest = sub %lse, %back %low = cast %rest : f32[1] "
      "return high: %high, low: %low }");
  CompileOptions options;
  options.chunks = 4;
  options.threads = 1;
  const CompiledProgram program = compile(graph, options);
  ASSERT_NE(program.explain().find("9000 in 4 chunks"), std::string::npos) << program.explain();
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
  const auto lse = [](const ir::Tensors& parts) {
    return parts.at("high").data[0] + parts.at("low").data[0];
  };
  const ir::Tensors parts = execute(program, inputs);
  EXPECT_NE(parts.at("low").data[0], 0.0) << program.text();
  options.chunks = 0;
  options.chunk = false;
  EXPECT_NEAR(lse(parts), lse(execute(compile(graph, options), inputs)), 1e-7);
}

TEST(Chunks, FewerThanElements) {
  for (const std::int64_t chunks : {2, 7, 100000}) {
    CompileOptions options;
    options.chunks = chunks;
    const std::string text = explained("mean_loss", options);
    std::smatch match;
    ASSERT_TRUE(std::regex_search(text, match, std::regex("(\\d+) in (\\d+) chunks"))) << text;
    EXPECT_EQ(std::stoll(match[2]), std::min<std::int64_t>(chunks, std::stoll(match[1]))) << text;
  }
}

TEST(Budget, IsMetOrSaidNotToBe) {
  CompileOptions options;
  options.memory_budget = 200 << 10;
  EXPECT_NE(explained("mean_loss", options).find(", met)"), std::string::npos);
  options.memory_budget = 1;
  EXPECT_NE(explained("mean_loss", options).find("NOT met: the least that was found is "),
            std::string::npos);
}

TEST(Compile, DoesNotGrowWithTheChunks) {
  const auto nodes = [](std::int64_t chunks) {
    CompileOptions options;
    options.sizes = program("mean_loss").sizes;
    options.memory_budget = 1;
    options.chunks = chunks;
    return ir::parse(compile(program("mean_loss").make(DType::f32), options).text()).graph.size();
  };
  EXPECT_EQ(nodes(3), nodes(149));
}

}  // namespace
}  // namespace logitless::test

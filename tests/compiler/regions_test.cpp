// The regions of losses whose chunks must be sequences or pairs of them. Slices move above a matrix
// product, and classes and hidden states connect big values.
#include <gtest/gtest.h>

#include "compiler/analysis/region.h"
#include "compiler/analysis/same_dims.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

void expect_narrowed(ir::Graph (*pass)(const ir::Graph&), const std::string& before,
                     const std::string& after) {
  const ir::Graph graph = ir::parse(before).graph, result = pass(graph);
  ir::verify(result);
  EXPECT_EQ(ir::print(result), ir::print(ir::parse(after).graph));
  const ir::Tensors inputs = random_inputs(graph, 1);
  EXPECT_LT(difference(ir::interpret(result, inputs), ir::interpret(graph, inputs)), 1e-12);
}

TEST(Narrow, SliceAboveTheProduct) {
  const std::string start = "graph g(%h: f64[2, 5, 3], %w: f64[7, 3]) { ";
  expect_narrowed(ir::narrow,
                  start +
                      "%z = dot %h, %w contract(2; 1) %e = exp %z %s = slice %e begin(0, 1, 0) "
                      "end(2, 5, 7) return s: %s }",
                  start +
                      "%0 = slice %h begin(0, 1, 0) end(2, 5, 3) %z = dot %0, %w contract(2; 1) "
                      "%e = exp %z return s: %e }");
  // Two slices that together read everything, and a reader of all of it: nothing is saved.
  for (const char* rest :
       {"%a = slice %z begin(0, 0, 0) end(2, 4, 7) %b = slice %z begin(0, 1, 0) end(2, 5, 7) "
        "return a: %a, b: %b }",
        "%a = slice %z begin(0, 0, 0) end(2, 4, 7) return a: %a, z: %z }"}) {
    const std::string text = start + "%z = dot %h, %w contract(2; 1) " + rest;
    expect_narrowed(ir::narrow, text, text);
  }
}

TEST(Narrow, PadBelowTheProduct) {
  const std::string start = "graph g(%d: f64[2, 4, 7], %h: f64[2, 5, 3], %w: f64[7, 3]) { ";
  expect_narrowed(ir::narrow,
                  start +
                      "%p = pad %d low(0, 0, 0) high(0, 1, 0) %x = dot %p, %w contract(2; 0) "
                      "%y = dot %p, %h contract(0, 1; 0, 1) return x: %x, y: %y }",
                  start +
                      "%x = dot %d, %w contract(2; 0) %1 = slice %h begin(0, 0, 0) end(2, 4, 3) "
                      "%y = dot %d, %1 contract(0, 1; 0, 1) %3 = pad %x low(0, 0, 0) "
                      "high(0, 1, 0) return x: %3, y: %y }");
}

// Logits are read in full and, for the first sequences, by a slice (CPO, SLiC). The gradient of the
// last position is zero in both.
TEST(Narrow, PadsThatAreAddedUp) {
  const std::string start = "graph g(%a: f64[1, 4, 7], %b: f64[2, 4, 7], %w: f64[7, 3]) { ";
  for (const std::string function : {"add", "sub"}) {
    expect_narrowed(ir::narrow,
                    start +
                        "%p = pad %a low(0, 0, 0) high(1, 1, 0) %q = pad %b low(0, 0, 0) "
                        "high(0, 1, 0) %d = " +
                        function + " %p, %q %x = dot %d, %w contract(2; 0) return x: %x }",
                    start + "%0 = pad %a low(0, 0, 0) high(1, 0, 0) %d = " + function +
                        " %0, %b %x = dot %d, %w contract(2; 0) %3 = pad %x low(0, 0, 0) "
                        "high(0, 1, 0) return x: %3 }");
  }
}

// Zeros are multiplied by zeros only.
TEST(Narrow, ProductsOfApartPads) {
  const std::string start = "graph g(%a: f64[2, 3], %b: f64[2, 4]) { ";
  const std::string text =
      start +
      "%p = pad %a low(0, 0) high(3, 0) %q = pad %b low(3, 0) high(0, 0) %y = dot %p, %q "
      "contract(0; 0) return y: %y }";
  const ir::Graph graph = ir::parse(text).graph;
  const ir::Graph narrowed = ir::narrow(graph);
  ir::verify(narrowed);
  const ir::Tensors inputs = random_inputs(graph, 1);
  EXPECT_EQ(difference(ir::interpret(narrowed, inputs), ir::interpret(graph, inputs)), 0.0);
}

TEST(Narrow, ThroughViews) {
  // The traced form: rows are one dimension around the product, and positions are a separate one.
  const std::string start = "graph g(%h: f64[10, 3], %w: f64[7, 3]) { ";
  expect_narrowed(ir::narrow_products,
                  start +
                      "%m = dot %h, %w contract(1; 1) %z = reshape %m : f64[2, 5, 7] %s = slice "
                      "%z begin(0, 0, 0) end(2, 4, 7) return s: %s }",
                  start +
                      "%0 = reshape %h : f64[2, 5, 3] %1 = slice %0 begin(0, 0, 0) end(2, 4, 3) "
                      "%m = dot %1, %w contract(2; 1) return s: %m }");
}

TEST(RefineAxes, HalvesOfABatch) {
  const std::string start =
      "graph g(%h: f64[12, 3], %w: f64[7, 3]) { %z = dot %h, %w "
      "contract(1; 1) %l = reduce_lse %z dims(1) ";
  const ir::Graph graph = ir::parse(start +
                                    "%s = reshape %l : f64[4, 3] %q = reduce_sum %s dims(1) %a = "
                                    "slice %q begin(0) end(2) %b = slice %q begin(2) end(4) %d = "
                                    "sub %a, %b return d: %d }")
                              .graph;
  const std::optional<ir::Graph> refined = ir::refine_axes(graph, ir::largest_product(graph));
  ASSERT_TRUE(refined);
  ir::verify(*refined);
  EXPECT_EQ(refined->type(ir::largest_product(*refined)), (ir::Type{DType::f64, {2, 2, 3, 7}}));
  const ir::Tensors inputs = random_inputs(graph, 1);
  EXPECT_LT(difference(ir::interpret(*refined, inputs), ir::interpret(graph, inputs)), 1e-12);
  // No reader splits these rows.
  const ir::Graph plain = ir::parse(start + "return l: %l }").graph;
  EXPECT_FALSE(ir::refine_axes(plain, ir::largest_product(plain)));
}

TEST(RefineAxes, ReadsEachResultOfAnOperation) {
  // The head's third result is a matrix, its first a vector.
  const ir::Graph graph =
      ir::parse(
          "graph g(%x: f32[6, 4], %w: f32[9, 4], %t: i64[6], %d: f32[6], %m: f32[8, 4]) { %l, %p, "
          "%dx = head %x, %w, %t, %d, %d bias(0) scale(1) softcap(0) workspace(0) gradients(f32, "
          "none, none) %y = dot %dx, %m contract(1; "
          "1) %a = slice %y begin(0, 0) end(6, 4) %b = slice %y begin(0, 4) end(6, 8) %s = sub %a, "
          "%b %v = slice %dx begin(0, 0) end(6, 2) return s: %s, v: %v }")
          .graph;
  const std::optional<ir::Graph> refined = ir::refine_axes(graph, ir::largest_product(graph));
  ASSERT_TRUE(refined);
  ir::verify(*refined);
  const ir::Tensors inputs = random_inputs(graph, 1);
  EXPECT_LT(difference(ir::interpret(*refined, inputs), ir::interpret(graph, inputs)), 1e-12);
}

// The gradient of many indices of a row is added to the memory of the row's softmax.
TEST(Puts, GoIntoTheOtherGradient) {
  const std::string text =
      "graph g(%h: f32[64, 8], %w: f32[1024, 8], %y: i64[64, 40], %t: f32[64, 40]) { %z = dot %h, "
      "%w contract(1; 1) %l = reduce_lse %z dims(1) %p = pick %z, %y axis(1) %lb = broadcast %l "
      "dims(0) : f32[64, 40] %lp = sub %p, %lb %m = mul %lp, %t %loss = reduce_sum %m dims(0, 1) "
      "return loss: %loss differentiate loss wrt %h, %w }";
  CompileOptions options;
  options.threads = 1;
  options.chunk = false;
  const Graph graph = Graph::parse(text);
  const CompiledProgram compiled = compile(graph, options);
  EXPECT_LT(compiled.arena_bytes(), std::size_t{64 * 1024 * 4 * 3 / 2}) << compiled.explain();
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 1);
  EXPECT_LT(difference(execute(compiled, inputs), ir::interpret(GraphAccess::of(graph), inputs)),
            1e-5);
}

// A mask of positions takes more steps than each reader would recompute, so a chunk of scores makes
// its rows. A mask that many layers read is made once, in full.
TEST(Masks, OfManyStepsAreCutWithWhatTheyMask) {
  for (const int layers : {1, 3}) {
    std::string text =
        "graph g(%x: f32[4, 96, 96]) { %i = iota axis(0) : i64[96, 96] %j = iota axis(1) : "
        "i64[96, 96] %b = sub %i, %j %o = constant value(0) : i64[96, 96] %e = constant value(24) "
        ": i64[96, 96] %ge = ge %b, %o %lt = lt %b, %e %seen = logical_and %ge, %lt %c = constant "
        "value(-1e30) : f32[4, 96, 96] %y0 = sin %x ";
    for (int i = 1; i <= layers; ++i) {
      const std::string n = std::to_string(i);
      text += "%w" + n + " = broadcast %seen dims(1, 2) : i8[4, 96, 96] %y" + n + " = select %w" +
              n + ", %y" + std::to_string(i - 1) + ", %c ";
    }
    const ir::Graph graph = ir::parse(text + "return y: %y" + std::to_string(layers) + " }").graph;
    int seed = -1, mask = -1;
    for (int id = 0; id < graph.size(); ++id) {
      seed = graph.node(id).name == "y1" ? id : seed;
      mask = graph.node(id).name == "seen" ? id : mask;
    }
    const ir::Region region = ir::grow_region(graph, {seed, 0}, ir::Split{1, 1, 1});
    EXPECT_EQ(region.inside(mask), layers == 1);
    EXPECT_TRUE(region.boundaries.empty());
  }
}

// Scores with a causal mask and a bias by distance: neither of these is in memory, nor is their
// sum.
TEST(Masks, TakeNoMemory) {
  const std::string text =
      "graph g(%x: f32[2, 4, 96, 96], %s: f32[4]) { %i = iota axis(0) : i64[96, 96] %j = iota "
      "axis(1) : i64[96, 96] %m = le %j, %i %mb = broadcast %m dims(2, 3) : i8[2, 4, 96, 96] %d = "
      "sub %j, %i %f = cast %d : f32[96, 96] %fb = broadcast %f dims(1, 2) : f32[4, 96, 96] %sb = "
      "broadcast %s dims(0) : f32[4, 96, 96] %a = mul %fb, %sb %ab = broadcast %a dims(1, 2, 3) : "
      "f32[2, 4, 96, 96] %z = add %x, %ab %c = constant value(-inf) : f32[2, 4, 96, 96] %y = "
      "select %mb, %z, %c %l = reduce_lse %y dims(3) return l: %l }";
  CompileOptions options;
  options.threads = 1;
  const Graph graph = Graph::parse(text);
  const CompiledProgram compiled = compile(graph, options);
  EXPECT_LT(compiled.arena_bytes(), std::size_t{96 * 96}) << compiled.explain();
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 1);
  EXPECT_LT(difference(execute(compiled, inputs), ir::interpret(GraphAccess::of(graph), inputs)),
            1e-5);
}

// --- programs, and their numbers of phases

struct Case {
  const char* name;
  std::string text;
};

const std::string kGradients = " return loss: %loss differentiate loss wrt %h, %w }";

// Log-probabilities of sequences with logits [B, T, V], summed under a mask.
std::string sequences(int batch, int length, bool shifted) {
  const std::string b = std::to_string(batch), t = std::to_string(length),
                    s = std::to_string(shifted ? length - 1 : length),
                    rows = std::to_string(batch * length);
  return "graph g(%h: F[" + b + ", " + t + ", 4], %w: F[512, 4], %y: i64[" + b + ", " + t +
         "], %m: F[" + b + ", " + s + "]) { %h2 = reshape %h : F[" + rows +
         ", 4] %mm = dot %h2, %w contract(1; 1) %z = reshape %mm : F[" + b + ", " + t + ", 512] " +
         (shifted ? "%zs = slice %z begin(0, 0, 0) end(" + b + ", " + s +
                        ", 512) %ys = slice %y begin(0, 1) end(" + b + ", " + t + ") "
                  : "%ys = reshape %y : i64[" + b + ", " + t + "] ");
}

std::string preference(bool shifted) {  // chosen sequences, then as many rejected ones
  std::string text = sequences(16, shifted ? 17 : 16, shifted);
  const std::string z = shifted ? "%zs" : "%z";
  return text + "%l = reduce_lse " + z + " dims(2) %p = pick " + z +
         ", %ys axis(2) %lp = sub %p, %l %lm = mul %lp, %m %q = reduce_sum %lm dims(1) %c = slice "
         "%q begin(0) end(8) %j = slice %q begin(8) end(16) %d = sub %c, %j %s = sigmoid %d %g = "
         "log %s %loss = reduce_sum %g dims(0)" +
         kGradients;
}

std::string shifted_mean() {
  return sequences(8, 33, true) +
         "%z2 = reshape %zs : F[256, 512] %y2 = reshape %ys : i64[256] %l = reduce_lse %z2 dims(1) "
         "%p = pick %z2, %y2 axis(1) %n = sub %l, %p %loss = reduce_sum %n dims(0)" +
         kGradients;
}

std::string by_sequence() {  // rows [B * T] become sequences only after the loss of each token
  return "graph g(%h: F[256, 4], %w: F[512, 4], %y: i64[256]) { %z = dot %h, %w contract(1; 1) %l "
         "= reduce_lse %z dims(1) %p = pick %z, %y axis(1) %lp = sub %p, %l %ls = reshape %lp : "
         "F[8, 32] %q = reduce_sum %ls dims(1) %s = sigmoid %q %g = log %s %loss = reduce_sum %g "
         "dims(0)" +
         kGradients;
}

std::string ten_labels() {
  return "graph g(%h: F[512, 8], %w: F[8, 256], %v: F[256, 10], %y: i64[512]) { %x = dot %h, %w "
         "contract(1; 0) %a = tanh %x %z = dot %a, %v contract(1; 0) %l = reduce_lse %z dims(1) %p "
         "= pick %z, %y axis(1) %n = sub %l, %p %loss = reduce_sum %n dims(0)" +
         kGradients;
}

std::string gated() {
  return "graph g(%h: F[512, 32], %w: F[32, 256], %u: F[32, 256], %v: F[256, 32]) { %x = dot %h, "
         "%w contract(1; 0) %g = dot %h, %u contract(1; 0) %s = sigmoid %g %m = mul %g, %s %a = "
         "mul %m, %x %y = dot %a, %v contract(1; 0) %r = add %h, %y %q = mul %r, %r %loss = "
         "reduce_sum %q dims(0, 1)" +
         kGradients;
}

std::string experts() {  // every expert for every token, weighted by a softmax
  return "graph g(%h: F[1024, 16], %r: F[16, 4], %w: F[4, 16, 64], %v: F[4, 64, 16]) { %s = dot "
         "%h, "
         "%r contract(1; 0) %l = reduce_lse %s dims(1) %lb = broadcast %l dims(0) : F[1024, 4] %sl "
         "= sub %s, %lb %p = exp %sl %x = dot %h, %w contract(1; 1) %a = tanh %x %at = transpose "
         "%a dims(1, 0, 2) %y = dot %at, %v batch(0; 0) contract(2; 1) %pt = transpose %p dims(1, "
         "0) %pb = broadcast %pt dims(0, 1) : F[4, 1024, 16] %yp = mul %y, %pb %o = reduce_sum %yp "
         "dims(0) %q = mul %o, %o %loss = reduce_sum %q dims(0, 1)" +
         kGradients;
}

std::vector<Case> cases() {
  return {{"preference", preference(false)},
          {"preference_shifted", preference(true)},
          {"shifted_mean", shifted_mean()},
          {"by_sequence", by_sequence()},
          {"ten_labels", ten_labels()},
          {"gated", gated()},
          {"experts", experts()}};
}

Graph program(const Case& c, const std::string& dtype) {
  std::string text = c.text;
  for (std::size_t at = text.find("F["); at != std::string::npos; at = text.find("F[", at))
    text.replace(at, 1, dtype);
  return Graph::parse(text);
}

class ChunkedLosses : public testing::TestWithParam<Case> {};

// Without a budget nothing may be recomputed: one phase, or no loop.
TEST_P(ChunkedLosses, OnePhaseAndNoMoreWork) {
  CompileOptions options;
  options.threads = 1;
  options.head_engine = false;
  const CompiledProgram compiled = compile(program(GetParam(), "f32"), options);
  const std::string text = compiled.explain();
  EXPECT_NE(text.find(", 1 phase;"), std::string::npos) << text;
  EXPECT_EQ(text.find(", 2 phases;"), std::string::npos) << text;
  EXPECT_EQ(text.find("% more"), std::string::npos) << text;
  EXPECT_LT(10 * compiled.arena_bytes(), 7 * compiled.unchunked_arena_bytes()) << text;
}

TEST_P(ChunkedLosses, SameNumbersInFloat64) {
  const Graph graph = program(GetParam(), "f64");
  const ir::Graph& plain = GraphAccess::of(graph);
  const ir::Tensors inputs = random_inputs(plain, 1);
  const ir::Tensors expected = ir::interpret(plain, inputs);
  CompileOptions options;
  options.threads = 2;
  options.chunks = 3;
  EXPECT_LT(difference(execute(compile(graph, options), inputs), expected), 1e-12);
}

INSTANTIATE_TEST_SUITE_P(All, ChunkedLosses, testing::ValuesIn(cases()),
                         [](const auto& test) { return std::string(test.param.name); });

// The last position of each sequence is not multiplied.
TEST(Narrow, SavesProducts) {
  const Graph graph = program(cases()[2], "f32");
  const ir::Graph& before = GraphAccess::of(graph);
  EXPECT_EQ(ir::product_work(ir::narrow_products(before)) * 33, ir::product_work(before) * 32);
}

}  // namespace
}  // namespace logitless::test

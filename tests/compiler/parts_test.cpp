// Values made of parts, each written in place by its instruction: concats, pads, and results of
// attention as columns.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <random>

#include "compiler/compiled.h"
#include "compiler/copies.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

ir::Program lowered(const ir::Graph& graph) { return ir::lower(graph, ir::CpuTarget(1)); }
ir::Program lowered(const std::string& text) { return lowered(ir::parse(text).graph); }

template <typename What>
std::vector<const What*> all(const ir::Program& program) {
  std::vector<const What*> list;
  for (const ir::Instruction& i : program.instructions) {
    if (const auto* what = std::get_if<What>(&i.what)) list.push_back(what);
  }
  return list;
}

CompiledProgram compiled(const Graph& graph, std::size_t budget = 0, std::int64_t chunks = 0) {
  CompileOptions options;
  options.memory_budget = budget;
  options.chunks = chunks;
  options.threads = 2;
  return compile(graph, options);
}
void expect_right(const Graph& graph, std::uint64_t seed, double tolerance, std::size_t budget = 0,
                  std::int64_t chunks = 0) {
  const ir::Graph& plain = GraphAccess::of(graph);
  const ir::Tensors inputs = random_inputs(plain, seed);
  const CompiledProgram program = compiled(graph, budget, chunks);
  const ir::Tensors expected = ir::interpret(plain, inputs);
  EXPECT_LT(difference(execute(program, inputs), expected), tolerance) << program.text();
  EXPECT_LT(difference(ir::interpret(ir::parse(program.text()).graph, inputs), expected), 1e-11)
      << program.text();
}

// Grouped queries: three parts of two sizes.
TEST(Attention, ReadsAndWritesColumns) {
  const auto text = [](const std::string& t) {
    return "graph g(%x: " + t + "[22, 12], %w: " + t + "[12, 40], %o: " + t +
           "[20, 12]) {\n"
           "%y = dot %x, %w contract(1; 0)\n"
           "%q0 = slice %y begin(0, 0) end(22, 20) %q1 = reshape %q0 : " +
           t +
           "[2, 11, 4, 5]\n"
           "%q = transpose %q1 dims(0, 2, 1, 3)\n"
           "%k0 = slice %y begin(0, 20) end(22, 30) %k1 = reshape %k0 : " +
           t +
           "[2, 11, 2, 5]\n"
           "%k = transpose %k1 dims(0, 2, 1, 3)\n"
           "%v0 = slice %y begin(0, 30) end(22, 40) %v1 = reshape %v0 : " +
           t +
           "[2, 11, 2, 5]\n"
           "%v = transpose %v1 dims(0, 2, 1, 3)\n"
           "%a, %l = attention %q, %k, %v causal(1) scale(0.4)\n"
           "%b = transpose %a dims(0, 2, 1, 3) %c = reshape %b : " +
           t +
           "[22, 20]\n"
           "%z = dot %c, %o contract(1; 0) %s = mul %z, %z %r = reduce_sum %s dims(0, 1)\n"
           "return r: %r differentiate r wrt %x, %w, %o }";
  };
  for (const auto& [dtype, tolerance] : {std::pair{"f32", 2e-5}, {"bf16", 0.05}, {"f16", 0.02}}) {
    SCOPED_TRACE(dtype);
    const Graph graph = Graph::parse(text(dtype));
    expect_right(graph, 3, tolerance);
    EXPECT_TRUE(copies(lowered(ir::parse(compiled(graph).text()).graph)).empty());
  }
}

// --- parts

TEST(Parts, AreWrittenByWhatMakesThem) {
  // The parts are a matrix product, an elementwise value, a row sum, and a concat of two.
  const ir::Program plan = lowered(
      "graph g(%x: f32[6, 4], %w: f32[4, 3]) { %a = dot %x, %w contract(1; 0) %b = exp %x %c = "
      "reduce_sum %x dims(1) %d = reshape %c : f32[6, 1] %e = tanh %x %f = concat %d, %e axis(1) "
      "%y = concat %a, %b, %f axis(1) return y: %y }");
  EXPECT_TRUE(copies(plan).empty());
  EXPECT_TRUE(all<ir::Fill>(plan).empty());
  EXPECT_EQ(plan.instructions.size(), 4u);
}

TEST(Parts, OfPadsAreWrittenOnce) {
  const ir::Program plan = lowered(
      "graph g(%x: f32[6, 4]) { %a = exp %x %y = pad %a low(1, 2) high(0, 3) return y: %y }");
  EXPECT_TRUE(copies(plan).empty());
  std::int64_t filled = 0;
  for (const ir::Fill* f : all<ir::Fill>(plan)) filled += ir::elements_of(f->out);
  EXPECT_EQ(filled, 7 * 9 - 6 * 4);
}

TEST(Parts, ThatCannotBeWrittenThereAreCopied) {
  const std::string text =
      "graph g(%x: f32[6, 4], %w: f32[4, 3]) { %a = dot %x, %w contract(1; 0) %y = concat %x, %a, "
      "%a axis(1) return y: %y }";
  EXPECT_EQ(copies(lowered(text)).size(), 2u);  // the parameter, and %a a second time
  expect_right(Graph::parse(text), 1, 2e-6);
}

// Memory for all parts waits for the last one, except if that would be at the peak.
TEST(Parts, DoNotRaiseThePeak) {
  const auto text = [](int elements) {
    return "graph g(%x: f32[16, 4], %w: f32[4, 4], %v: f32[" + std::to_string(elements) +
           "]) { %a = dot %x, %w contract(1; 0) %p = dot %v, %a contract(; ) %s = reduce_sum %p "
           "dims(0, 1, 2) %d = broadcast %s dims() : f32[16, 100] %e = tanh %d %y = concat %a, %e "
           "axis(1) %o = dot %y, %y contract(0; 0) %r = reduce_max %o dims(0, 1) return r: %r }";
  };
  // The peak is at %p, when most of %y would wait, or at %o.
  EXPECT_EQ(copies(lowered(text(1000))).size(), 2u);
  EXPECT_TRUE(copies(lowered(text(10))).empty());
  for (const int elements : {10, 1000}) expect_right(Graph::parse(text(elements)), 1, 2e-5);
}

// A value that others read later must not be added to in place.
TEST(Parts, ThatAreReadAgainAreNotAddedTo) {
  const std::string start =
      "graph g(%x: f32[6, 4], %w: f32[4, 3], %v: f32[4, 6], %u: f32[9, 4], %t: f32[4, 2]) { %a = "
      "dot %x, %w contract(1; 0) ";
  for (const std::string sum : {"%c = concat %a, %a axis(1) %b = dot %x, %v contract(1; 0) ",
                                "%c = reshape %a : f32[9, 2] %b = dot %u, %t contract(1; 0) "}) {
    const std::string text =
        start + sum + "%y = add %c, %b %e = dot %a, %a contract(1; 1) return y: %y, e: %e }";
    expect_right(Graph::parse(text), 5, 2e-6);
    // No instruction after the sum reads %a.
    int summed = -1;
    for (const ir::Instruction& i : lowered(text).instructions) {
      const auto* product = std::get_if<ir::Gemm>(&i.what);
      if (product == nullptr) continue;
      EXPECT_NE(product->a.buffer, summed) << text;
      if (product->accumulate) summed = product->c.buffer;
    }
  }
}

// --- programs of slices, with gradients, in chunks

class Sliced {
 public:
  explicit Sliced(std::uint64_t seed) : rng_(seed), g_("sliced") {}

  Graph make() {
    const std::int64_t dim = 1 + below(5);
    const Value x = g_.parameter("x", DType::f64, {rows_, dim}),
                w = g_.parameter("w", DType::f64, {dim, 30});
    whole_ = {dot(x, w, {{1}, {0}})};
    if (below(2) == 0) whole_.push_back(tanh(whole_[0]));
    Value loss = sum(square(whole_.back()), {0, 1}) * 0.1;
    for (int i = 3 + below(5); i > 0; --i) loss = loss + term();
    g_.result("loss", loss);
    const std::vector<Value> grads = g_.gradients({loss}, {x, w});
    g_.result("dx", grads[0]);
    g_.result("dw", grads[1]);
    return std::move(g_);
  }

 private:
  std::mt19937_64 rng_;
  Graph g_;
  std::vector<Value> whole_;
  const std::int64_t rows_ = 24;

  int below(int n) { return static_cast<int>(rng_() % static_cast<unsigned>(n)); }
  // Slices a slice along columns and sometimes rows.
  Value part() {
    Value v = whole_[static_cast<std::size_t>(below(static_cast<int>(whole_.size())))];
    for (int i = 1 + below(2); i > 0; --i) {
      const int axis = below(4) == 0 ? 0 : 1;
      const std::int64_t size = v.shape()[static_cast<std::size_t>(axis)].value();
      const std::int64_t begin = below(3) * size / 3,
                         length = 1 + below(static_cast<int>(size - begin));
      v = slice(v, axis, begin, begin + length);
    }
    return v;
  }
  Value term() {
    const Value v = part();
    switch (below(5)) {
      case 0:
        return sum(tanh(v), {0, 1});
      case 1:
        return mean(logsumexp(v, {1}), {0});
      case 2:  // parts side by side
        return sum(square(concat({tanh(v), v}, 1)) * 0.3, {0, 1});
      case 3:
        return sum(square(dot(v, v, {{0}, {0}})) * 0.01, {0, 1});
      default:
        return sum(sigmoid(transpose(v, {1, 0})), {0, 1});
    }
  }
};

TEST(Parts, OfRandomPrograms) {
  std::uint64_t joined = 0;
  const std::uint64_t programs = kAddressSanitizer ? 12 : 50;
  for (std::uint64_t seed = 1; seed <= programs && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const Graph graph = Sliced(seed).make();
    expect_right(graph, seed, 1e-11, seed % 2, static_cast<std::int64_t>(seed % 4));
    const ir::Graph after = ir::parse(compiled(graph).text()).graph;
    for (const ir::Node& n : after.nodes()) joined += n.op == ir::Op::concat;
  }
  EXPECT_GT(joined, kAddressSanitizer ? 5U : 50U);
}

// A loop over rows of three parts: the body joins the gradient of the full value.
TEST(Parts, InChunks) {
  const Graph graph = Graph::parse(
      "graph g(%x: f64[90, 6], %w: f64[6, 300]) { %y = dot %x, %w contract(1; 0) %a = slice %y "
      "begin(0, 0) end(90, 100) %b = slice %y begin(0, 100) end(90, 220) %c = slice %y begin(0, "
      "220) end(90, 300) %d = tanh %a %e = sin %b %f = reduce_lse %c dims(1) %g = reduce_sum %d "
      "dims(0, 1) %h = reduce_sum %e dims(0, 1) %i = reduce_sum %f dims(0) %j = add %g, %h %l = "
      "add %j, %i return l: %l differentiate l wrt %x, %w }");
  const std::string text = compiled(graph, 1, 5).text();
  const std::size_t loop = text.find("= loop");
  ASSERT_NE(loop, std::string::npos) << text;
  EXPECT_NE(text.find("concat", loop), std::string::npos) << text;
  EXPECT_EQ(text.find("pad "), std::string::npos) << text;
  for (const std::int64_t chunks : {1, 4, 7}) expect_right(graph, 2, 1e-11, 1, chunks);
}

}  // namespace
}  // namespace logitless::test

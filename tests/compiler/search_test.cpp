// The search for programs of less memory: a larger budget never gets a plan that a smaller one
// beats. The search never gives up silently.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <algorithm>
#include <string>

#include "compiler/programs.h"

namespace logitless::test {
namespace {

constexpr std::size_t operator""_MB(unsigned long long n) { return n << 20; }

CompiledProgram compiled(const Graph& graph, const Bindings& sizes, std::size_t budget,
                         std::int64_t chunks = 0, bool explore = false) {
  CompileOptions options;
  options.sizes = sizes;
  options.memory_budget = budget;
  options.chunks = chunks;
  options.explore = explore;
  options.head_engine = false;
  options.threads = 1;
  return compile(graph, options);
}

const PlanPoint& chosen(const CompiledProgram& program) {
  const auto& plans = program.plans();
  return *std::find_if(plans.begin(), plans.end(), [](const PlanPoint& p) { return p.chosen; });
}

bool beats(const PlanPoint& a, const PlanPoint& b) {
  return a.value_bytes <= b.value_bytes && a.seconds < 0.99 * b.seconds;
}

class Search : public testing::TestWithParam<NamedProgram> {};

TEST_P(Search, MoreBytesBuyTime) {
  const NamedProgram& p = GetParam();
  const CompiledProgram all = compiled(p.make(DType::f32), p.sizes, 0, 0, true);
  const std::vector<PlanPoint>& front = all.plans();
  ASSERT_FALSE(front.empty());
  for (std::size_t i = 1; i < front.size(); ++i) {
    EXPECT_GT(front[i].value_bytes, front[i - 1].value_bytes) << all.explain();
    EXPECT_TRUE(front[i].seconds < front[i - 1].seconds || front[i].chosen) << all.explain();
  }
  // Exploring changes what is known, not what is chosen.
  EXPECT_EQ(compiled(p.make(DType::f32), p.sizes, 0).text(), all.text());
}

TEST_P(Search, ABudgetTakesTheFastestPlanWithinIt) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::f32);
  const CompiledProgram all = compiled(graph, p.sizes, 0, 0, true);
  PlanPoint last;
  const std::size_t most = 2 * all.plans().back().value_bytes;
  for (std::size_t budget = all.plans().front().value_bytes / 2; budget < most; budget *= 5) {
    SCOPED_TRACE(budget);
    const CompiledProgram program = compiled(graph, p.sizes, budget);
    const PlanPoint& got = chosen(program);
    EXPECT_EQ(got.seconds, program.predicted_seconds());
    EXPECT_LE(got.arena_bytes, program.unchunked_arena_bytes());
    bool fits = false;
    for (const PlanPoint& other : all.plans()) {
      fits = fits || other.value_bytes <= budget;
      EXPECT_FALSE(beats(other, got)) << program.explain();
    }
    EXPECT_TRUE(got.value_bytes <= budget || !fits) << program.explain();
    if (last.value_bytes > 0) {
      EXPECT_GE(got.value_bytes, last.value_bytes);
      EXPECT_LE(got.seconds, last.seconds);
    }
    last = got;
  }
}

// The bits of sums depend on chunks, and these do not depend on threads.
TEST_P(Search, PlansAreTheSameForAnyNumberOfThreads) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::f32);
  CompileOptions options;
  options.sizes = p.sizes;
  options.threads = 1;
  const std::size_t whole = compile(graph, options).unchunked_arena_bytes();
  for (const std::size_t budget : {std::size_t{0}, whole / 4, whole / 16}) {
    options.memory_budget = budget;
    options.threads = 1;
    const std::string text = compile(graph, options).text();
    for (const int threads : {2, 5}) {
      options.threads = threads;
      EXPECT_EQ(compile(graph, options).text(), text) << budget << ", " << threads;
    }
  }
}

TEST_P(Search, NoNumberOfChunksBeatsIt) {
  const NamedProgram& p = GetParam();
  const Graph graph = p.make(DType::f32);
  const CompiledProgram all = compiled(graph, p.sizes, 0, 0, true);
  if (all.explain().find("there may be better ones") != std::string::npos)
    GTEST_SKIP() << "the search was bounded, and says so";
  for (const std::int64_t chunks : {2, 4, 8, 16, 32, 64}) {
    const CompiledProgram forced = compiled(graph, p.sizes, 0, chunks);
    for (const PlanPoint& ours : all.plans()) {
      if (ours.chosen) continue;  // free plans are chosen for their bytes as well
      EXPECT_FALSE(beats(chosen(forced), ours))
          << chunks << " chunks take " << chosen(forced).value_bytes << " bytes and "
          << chosen(forced).seconds << " s, ours " << ours.value_bytes << " and " << ours.seconds
          << "\n"
          << all.explain();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Search, testing::ValuesIn(programs()),
                         [](const auto& test) { return test.param.name; });

// --- budgets that were met with work that another plan avoids

Graph with_gradients(Graph graph, Value loss, const std::vector<Value>& wrt) {
  graph.result("loss", loss);
  const std::vector<Value> grads = graph.gradients({loss}, wrt);
  for (std::size_t i = 0; i < grads.size(); ++i) graph.result("d" + std::to_string(i), grads[i]);
  return graph;
}

// Causal attention written out: softmax(q k^T with a mask) v.
Graph causal_attention(std::int64_t heads, std::int64_t length, std::int64_t dim) {
  Graph g("causal_attention");
  std::vector<Value> in;
  for (const char* name : {"q", "k", "v"})
    in.push_back(g.parameter(name, DType::f32, {heads, length, dim}));
  const Shape shape = {heads, length, length};
  const Value scores = dot(in[0], in[1], {{2}, {2}, {0}, {0}}) * 0.125;
  const Value later = less(g.iota(shape, 1), g.iota(shape, 2));
  const Value masked = select(later, g.constant(-1e30, DType::f32, shape), scores);
  const Value out = dot(softmax(masked, 2), in[2], {{2}, {1}, {0}, {0}});
  const Value loss = mean(square(out), {0, 1, 2});
  return with_gradients(std::move(g), loss, in);
}

Graph silu_mlp(std::int64_t rows, std::int64_t dim, std::int64_t hidden) {
  Graph g("silu_mlp");
  const Value x = g.parameter("x", DType::f32, {rows, dim}),
              up = g.parameter("up", DType::f32, {dim, hidden}),
              down = g.parameter("down", DType::f32, {hidden, dim});
  const Value y = matmul(silu(matmul(x, up)), down);
  const Value loss = mean(square(y), {0, 1});
  return with_gradients(std::move(g), loss, {x, up, down});
}

Graph entropy_only(std::int64_t rows, std::int64_t dim, std::int64_t vocab) {
  Graph g("entropy_only");
  const Value x = g.parameter("x", DType::f32, {rows, dim}),
              w = g.parameter("w", DType::f32, {vocab, dim});
  const Value logp = log_softmax(dot(x, w, {{1}, {1}}), 1);
  const Value loss = -mean(sum(exp(logp) * logp, {1}), {0});
  return with_gradients(std::move(g), loss, {x, w});
}

void expect_met_for_nothing(const Graph& graph, std::size_t budget) {
  const CompiledProgram program = compiled(graph, {}, budget);
  EXPECT_LE(chosen(program).value_bytes, budget) << program.explain();
  EXPECT_LT(chosen(program).extra_work, 1e-3) << program.explain();
  for (std::int64_t chunks = 2; chunks <= 64; chunks *= 2) {
    const CompiledProgram forced = compiled(graph, {}, 0, chunks);
    EXPECT_FALSE(beats(chosen(forced), chosen(program))) << forced.explain() << program.explain();
  }
}

TEST(SearchWithABudget, TakesNoWorkThatAnotherPlanDoesWithout) {
  expect_met_for_nothing(causal_attention(4, 2048, 64), 66_MB);
  expect_met_for_nothing(silu_mlp(8192, 512, 2048), 64_MB);
  expect_met_for_nothing(entropy_only(4096, 256, 16384), 16_MB);
}

// Log-probabilities of sequences by two models, one of which learns. The first half of the
// sequences is compared with the second. In one phase a chunk holds two sequences, a quarter of
// all.
Graph compared_pairs(std::int64_t pairs, std::int64_t length, std::int64_t dim,
                     std::int64_t vocab) {
  Graph g("compared_pairs");
  const Value labels = g.parameter("labels", DType::i64, {2 * pairs, length});
  std::vector<Value> in;
  const auto log_probs = [&](const std::string& model) {
    in.push_back(g.parameter(model + "_x", DType::f32, {2 * pairs, length, dim}));
    in.push_back(g.parameter(model + "_w", DType::f32, {vocab, dim}));
    const Value logits = dot(in[in.size() - 2], in.back(), {{2}, {1}});
    return sum(pick(log_softmax(logits, 2), labels, 2), {1});
  };
  const Value gain = log_probs("policy") - log_probs("reference");
  const Value margin = slice(gain, 0, 0, pairs) - slice(gain, 0, pairs, 2 * pairs);
  const Value loss = -mean(log(sigmoid(margin * 0.1)), {0});
  return with_gradients(std::move(g), loss, {in[0], in[1]});
}

// Two big values: while one of them is full, no cut of the other lowers the peak, and the cut
// without recomputation is the fastest. The other cuts must not be dropped for that.
TEST(SearchWithABudget, TriesOtherCutsThanOneThatIsAsLowAsItComes) {
  constexpr std::int64_t kPairs = 4, kLength = 32, kVocab = 1024;
  const std::size_t big = 2 * kPairs * kLength * kVocab * 4;
  const Graph graph = compared_pairs(kPairs, kLength, 16, kVocab);
  for (const std::size_t part : {4, 8}) {
    const CompiledProgram program = compiled(graph, {}, big / part);
    EXPECT_LE(chosen(program).value_bytes, big / part) << program.explain();
  }
}

// --- programs of many parts

// Returns `layers` blocks of attention over one sequence, which cannot be cut, a layer norm and an
// MLP.
Graph blocks(std::int64_t layers, std::int64_t rows, std::int64_t dim) {
  Graph g("blocks");
  Value x = g.parameter("x", DType::f32, {rows, dim});
  std::vector<Value> wrt;
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string n = std::to_string(i);
    const auto weight = [&](const std::string& name, Shape shape) {
      wrt.push_back(g.parameter(name + n, DType::f32, std::move(shape)));
      return wrt.back();
    };
    const Value q = reshape(x, {1, 1, rows, dim});
    x = x + reshape(attention(q, q, q, 0.1, true), {rows, dim});
    const Value h = layer_norm(x, weight("gain", {dim}), weight("bias", {dim}));
    x = x + matmul(gelu(matmul(h, weight("up", {dim, 4 * dim}))), weight("down", {4 * dim, dim}));
  }
  const Value loss = mean(square(x), {0, 1});
  return with_gradients(std::move(g), loss, wrt);
}

// Returns a chain of functions that store their operand for the gradient.
Graph chain(int length, std::int64_t rows, std::int64_t columns) {
  Graph g("chain");
  const Value x = g.parameter("x", DType::f32, {rows, columns});
  Value y = x;
  for (int i = 0; i < length; ++i) y = apply("sin", {y * (1.0 + 0.001 * i)});
  const Value loss = sum(y, {0, 1});
  return with_gradients(std::move(g), loss, {x});
}

Graph many_heads(int heads, std::int64_t rows, std::int64_t vocab) {
  Graph g("heads");
  const Value x = g.parameter("x", DType::f32, {rows, 16});
  const Value t = g.parameter("t", DType::i64, {rows});
  Value loss = g.constant(0.0);
  std::vector<Value> wrt = {x};
  for (int i = 0; i < heads; ++i) {
    wrt.push_back(g.parameter("w" + std::to_string(i), DType::f32, {vocab, 16}));
    const Value z = tanh(dot(x, wrt.back(), {{1}, {1}}));
    loss = loss + mean(logsumexp(z, {1}) - pick(z, t, 1), {0});
  }
  return with_gradients(std::move(g), loss, wrt);
}

// Checks that loops reach a fraction of the bytes without loops.
CompiledProgram expect_loops(const Graph& graph, double part) {
  CompileOptions whole;
  whole.chunk = false;
  whole.threads = 1;
  const auto bytes = static_cast<double>(compile(graph, whole).arena_bytes());
  const auto budget = static_cast<std::size_t>(bytes / part);
  CompiledProgram program = compiled(graph, {}, budget);
  EXPECT_NE(program.text().find("loop"), std::string::npos) << program.explain();
  EXPECT_LE(chosen(program).value_bytes, budget) << program.explain();
  return program;
}

TEST(SearchOfManyParts, FindsLoopsForAChainOf400Operations) {
  expect_loops(chain(400, 512, 64), 50);
}
TEST(SearchOfManyParts, FindsLoopsFor70Heads) { expect_loops(many_heads(70, 256, 1000), 10); }

TEST(SearchOfManyParts, CutsLayersTogetherAndSaysWhatBoundedIt) {
  const CompiledProgram program = expect_loops(blocks(20, 512, 32), 1.5);
  EXPECT_NE(program.explain().find(" alike\n"), std::string::npos) << program.explain();
  EXPECT_NE(program.explain().find("as many as its size leaves room for"), std::string::npos)
      << program.explain();
  // One loop's body stands for those of other layers, and the text says so.
  const std::string text = program.text();
  EXPECT_TRUE(text.starts_with("# c")) << text.substr(0, 200);
  EXPECT_NE(text.substr(0, text.find("\ngraph ")).find(" like it: %"), std::string::npos) << text;
  EXPECT_NO_THROW(Graph::parse(text));
  const CompiledProgram small = compiled(chain(3, 64, 8), {}, 1);
  EXPECT_NE(small.explain().find("no move is left"), std::string::npos) << small.explain();
}

}  // namespace
}  // namespace logitless::test

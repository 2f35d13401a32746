// Cuts, loops and memory against brute force: all cuts of all operations, random graphs, views
// against index arithmetic, and the memory that programs write.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>

#include "compiler/analysis/region.h"
#include "compiler/graph_access.h"
#include "compiler/ir/build.h"
#include "compiler/ir/text.h"
#include "compiler/passes/form_loops.h"
#include "compiler/plan/lower.h"
#include "compiler/plan/views.h"
#include "compiler/programs.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

using Sizes = std::vector<std::int64_t>;

// --- cuts

// Graphs whose last node is an operation, in many forms. Indices are 0 to 6, and some are outside.
const std::vector<std::string>& operations() {
  static const std::vector<std::string> list = {
      "%x: f64[4, 6] ; add %x, %x",
      "%x: f64[2, 3, 4], %z: f64[2, 3, 4] ; mul %x, %z",
      "%c: i8[4, 6], %x: f64[4, 6], %z: f64[4, 6] ; select %c, %x, %z",
      "%x: f64[4, 6] ; cast %x : f32[4, 6]",
      "%x: f64[4, 6] ; stop_gradient %x",
      "%x: f64[4, 3] ; broadcast %x dims(0, 2) : f64[4, 2, 3]",
      "%x: f64[2, 3] ; broadcast %x dims(1, 2) : f64[4, 2, 3]",
      "%x: f64[] ; broadcast %x dims() : f64[4, 2]",
      "%x: f64[4, 6] ; reshape %x : f64[2, 2, 3, 2]",
      "%x: f64[2, 2, 3, 2] ; reshape %x : f64[4, 6]",
      "%x: f64[4, 1, 6] ; reshape %x : f64[1, 24, 1]",
      "%x: f64[6, 4] ; reshape %x : f64[4, 6]",
      "%x: f64[2, 3, 4] ; transpose %x dims(1, 2, 0)",
      "%x: f64[2, 3, 4] ; transpose %x dims(2, 0, 1)",
      "%x: f64[4, 6, 2] ; slice %x begin(0, 1, 0) end(4, 5, 2)",
      "%x: f64[4, 6, 2] ; pad %x low(0, 1, 0) high(0, 0, 0)",
      "%x: f64[2, 4, 3], %z: f64[2, 2, 3] ; concat %x, %z axis(1)",
      "%x: f64[2, 3, 4] ; reduce_sum %x dims(1)",
      "%x: f64[2, 3, 4] ; reduce_sum %x dims(0, 2)",
      "%x: f64[2, 3, 4] ; reduce_max %x dims(2)",
      "%x: f64[2, 3, 4] ; reduce_lse %x dims(0, 1)",
      "%x: f64[4, 6] ; argmax %x dims(1)",
      "%x: i64[4, 6] ; reduce_sum %x dims(0)",
      "%a: f64[4, 6], %b: f64[3, 6] ; dot %a, %b contract(1; 1)",
      "%a: f64[2, 3, 4, 2], %b: f64[2, 4, 5, 2] ; dot %a, %b batch(0; 0) contract(2, 3; 1, 3)",
      "%a: f64[4, 3, 2], %b: f64[6, 2, 3] ; dot %a, %b contract(1, 2; 2, 1)",
      "%a: f64[2, 3, 4], %b: f64[4, 2, 5] ; dot %a, %b batch(2, 0; 0, 1) contract(; )",
      "%w: f64[6, 4], %t: i64[2, 3] ; take %w, %t",
      "%w: f64[5, 2, 3], %t: i32[4] ; take %w, %t",
      "%t: i64[2, 3], %u: f64[2, 3, 4] ; scatter_add %t, %u rows(6)",
      "%t: i32[4], %u: f64[4, 2, 3] ; scatter_add %t, %u rows(5)",
      "%x: f64[6, 4], %t: i64[6] ; pick %x, %t axis(1)",
      "%x: f64[2, 6, 3], %t: i32[2, 3] ; pick %x, %t axis(1)",
      "%q: f64[2, 4, 3, 2], %k: f64[2, 2, 5, 2] ; attention %q, %k, %k causal(1) scale(0.7)",
      "%q: f64[2, 4, 3, 2], %k: f64[2, 4, 3, 2], %v: f64[2, 4, 3, 2] ; attention %q, %k, %v "
      "causal(0) scale(0.7)",
      "%q: f64[2, 4, 3, 2], %k: f64[2, 2, 3, 2], %v: f64[2, 2, 3, 2], %o: f64[2, 4, 3, 2], %l: "
      "f64[2, 4, 3], %g: f64[2, 4, 3, 2] ; attention_grad %q, %k, %v, %o, %l, %g causal(1) "
      "scale(0.7)",
      "%q: f64[2, 4, 3, 2], %k: f64[2, 2, 5, 2], %b: f64[1, 4, 1, 5] ; attention %q, %k, %k, %b "
      "causal(0) scale(0.7) softcap(2) window(3) bias(1)",
      "%q: f64[2, 4, 3, 2], %k: f64[2, 2, 5, 2], %o: f64[2, 4, 3, 2], %l: f64[2, 4, 3], %g: f64[2, "
      "4, 3, 2], %b: f64[2, 1, 3, 5], %s: i64[2, 3], %u: i64[2, 5] ; attention_grad %q, %k, %k, "
      "%o, %l, %g, %b, %s, %u causal(1) scale(0.7) softcap(2) window(3) bias(1) segments(1)",
  };
  return list;
}

ir::Graph graph_of(const std::string& operation) {
  const std::size_t cut = operation.find(" ; ");
  const std::string what = operation.substr(cut + 3);
  const std::string names = what.starts_with("attention_grad") ? "%y, %y1, %y2"
                            : what.starts_with("attention")    ? "%y, %y1"
                                                               : "%y";
  return ir::parse("graph g(" + operation.substr(0, cut) + ") { " + names + " = " + what + " }")
      .graph;
}

std::vector<ir::Split> splits_of(const ir::Type& type) {
  const Sizes sizes = ir::sizes_of(type);
  std::vector<ir::Split> splits;
  for (int d = 0; d < type.rank(); ++d) {
    std::int64_t elements = 1;
    for (int count = 1; d + count <= type.rank(); ++count) {
      elements *= sizes[static_cast<std::size_t>(d + count - 1)];
      for (std::int64_t factor = 1; factor <= elements; ++factor) {
        const ir::Split s{d, count, factor};
        if (elements % factor == 0 && ir::normalized(sizes, s) == s) splits.push_back(s);
      }
    }
  }
  return splits;
}
std::int64_t extent_of(const ir::Type& type, const ir::Split& s) {
  std::int64_t elements = 1;
  for (int k = 0; k < s.count; ++k)
    elements *= type.shape[static_cast<std::size_t>(s.dim + k)].value();
  return elements / s.factor;
}

void give_out(ir::Graph& g, int node, const std::string& prefix = "y") {
  for (std::size_t i = 0; i < g.node(node).results.size(); ++i)
    g.add_output(prefix + std::to_string(i), {node, static_cast<std::int32_t>(i)});
}

void expect_same(const ir::Graph& plain, const ir::Graph& looped, std::uint64_t seed) {
  ASSERT_NO_THROW(ir::verify(looped)) << ir::print(looped);
  const ir::Tensors inputs = random_inputs(plain, seed);
  EXPECT_LT(difference(ir::interpret(looped, inputs), ir::interpret(plain, inputs)), 1e-11)
      << ir::print(plain) << ir::print(looped);
}
void expect_same_in_chunks(const ir::Graph& g, const ir::Region& region) {
  for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{2}, region.extent})
    expect_same(g, ir::form_loops(g, region, chunk), 3);
}

TEST(Cuts, OfEveryResultRunChunkByChunk) {
  for (const std::string& operation : operations()) {
    SCOPED_TRACE(operation);
    ir::Graph g = graph_of(operation);
    const int node = g.size() - 1;
    give_out(g, node);
    int cuts = 0;
    for (const ir::Split& s : splits_of(g.node(node).results[0])) {
      const std::optional<ir::Chunked> how = ir::chunked_by_result(g, node, s);
      if (!how) continue;
      SCOPED_TRACE(text_of(s));
      ASSERT_EQ(how->kind, ir::Chunked::Kind::split);
      ASSERT_EQ(how->results[0], s);
      ++cuts;
      expect_same_in_chunks(g, {{node, 0},
                                extent_of(g.node(node).results[0], s),
                                {{node, *how}},
                                std::vector<int>(static_cast<std::size_t>(g.size())),
                                1,
                                {}});
    }
    EXPECT_GT(cuts, 0);
  }
}

// Another node makes the operand, which is the seed, and the tested node follows it.
TEST(Cuts, OfEveryOperandRunChunkByChunk) {
  std::set<std::pair<std::string, ir::Chunked::Kind>> seen;
  for (const std::string& operation : operations()) {
    SCOPED_TRACE(operation);
    const ir::Graph plain = graph_of(operation);
    const ir::Node& last = plain.node(plain.size() - 1);
    for (std::size_t i = 0; i < last.operands.size(); ++i) {
      ir::Graph g;
      for (int id = 0; id + 1 < plain.size(); ++id)
        g.add(ir::Op::parameter, {}, plain.node(id).attributes);
      const ir::Value seed = g.add(ir::Op::stop_gradient, {last.operands[i]});
      std::vector<ir::Value> operands = last.operands;
      operands[i] = seed;
      const int node = g.add(last.op, operands, last.attributes).node;
      give_out(g, node);
      for (const ir::Split& s : splits_of(g.type(seed))) {
        const std::optional<ir::Chunked> how = ir::chunked_by_operand(g, node, i, s);
        if (!how) continue;
        SCOPED_TRACE("operand " + std::to_string(i) + ": " + text_of(s));
        seen.emplace(name_of(last.op), how->kind);
        expect_same_in_chunks(g,
                              {seed,
                               extent_of(g.type(seed), s),
                               {{seed.node, *ir::chunked_by_result(g, seed.node, s)}, {node, *how}},
                               std::vector<int>(static_cast<std::size_t>(g.size())),
                               1,
                               {}});
      }
    }
  }
  using Kind = ir::Chunked::Kind;
  for (const char* op :
       {"map", "cast", "stop_gradient", "broadcast", "reshape", "transpose", "slice", "pad",
        "concat", "reduce", "dot", "take", "scatter_add", "pick", "attention", "attention_grad"})
    EXPECT_TRUE(seen.contains({op, Kind::split})) << op;
  for (const char* op : {"reduce", "dot", "take", "scatter_add", "pick"})
    EXPECT_TRUE(seen.contains({op, Kind::sum})) << op;
  EXPECT_TRUE(seen.contains({"reduce", Kind::max}));
  EXPECT_TRUE(seen.contains({"reduce", Kind::lse}));
}

// --- random graphs

class RandomGraph {
 public:
  explicit RandomGraph(std::uint64_t seed) : rng_(seed) {}

  ir::Graph make(int nodes) {
    for (const char* name : {"x", "z"}) {
      Sizes shape;
      for (int d = 1 + below(3); d > 0; --d) shape.push_back(size());
      parameter(name, {DType::f64, Shape(shape.begin(), shape.end())});
    }
    while (static_cast<int>(values_.size()) < nodes + 2) add();
    std::set<ir::Value> read;
    for (const ir::Node& n : g_.nodes()) read.insert(n.operands.begin(), n.operands.end());
    for (const ir::Value v : std::set<ir::Value>(values_.begin(), values_.end())) {
      if (!read.contains(v) || below(6) == 0) g_.add_output("r" + std::to_string(v.node), v);
    }
    return std::move(g_);
  }

 private:
  std::mt19937_64 rng_;
  ir::Graph g_;
  std::vector<ir::Value> values_;  // bounded floats
  int indices_ = 0;

  int below(int n) { return static_cast<int>(rng_() % static_cast<unsigned>(n)); }
  std::int64_t size() {
    constexpr std::int64_t kSizes[] = {1, 2, 3, 4, 6, 8};
    return kSizes[below(6)];
  }
  ir::Value parameter(const std::string& name, ir::Type type) {
    ir::Attributes a;
    a.name = name;
    a.type = std::move(type);
    const bool real = a.type.dtype == DType::f64;
    const ir::Value v = g_.add(ir::Op::parameter, {}, std::move(a));
    if (real) values_.push_back(v);
    return v;
  }
  // Half of the indices are computed by a node, so that indices are cut as well.
  ir::Value index(const Shape& shape) {
    const DType dtype = below(2) == 0 ? DType::i32 : DType::i64;
    const ir::Value v = parameter("t" + std::to_string(indices_++), {dtype, shape});
    return below(2) == 0 ? v
                         : ir::map(g_, ir::Function::neg, {ir::map(g_, ir::Function::neg, {v})});
  }
  ir::Value bounded(ir::Value v) { return ir::map(g_, ir::Function::tanh, {v}); }
  Sizes shape(ir::Value v) { return ir::sizes_of(g_.type(v)); }
  std::vector<int> some_dims(int rank) {
    std::vector<int> dims;
    while (dims.empty()) {
      for (int d = 0; d < rank; ++d)
        if (below(2) == 0) dims.push_back(d);
    }
    return dims;
  }

  void add() {
    const ir::Value x = values_[static_cast<std::size_t>(below(static_cast<int>(values_.size())))];
    const ir::Value last = values_.back();
    const int rank = g_.type(x).rank(), d = rank > 0 ? below(rank) : 0;
    const auto ud = static_cast<std::size_t>(d);
    const Shape s = g_.type(x).shape;
    ir::Attributes a;
    a.axis = d;
    ir::Value y;
    const int kind = below(rank > 0 ? 15 : 2);
    if (ir::elements_of(g_.type(x)) > 600 && kind != 4) return;  // limits the growth
    switch (kind) {
      case 0:
        y = ir::map(g_, ir::Function::sin, {x});
        break;
      case 1: {
        const Dim n = size();
        std::vector<int> dims(static_cast<std::size_t>(rank));
        Shape to = s;
        const int at = below(rank + 1);
        to.insert(to.begin() + at, n);
        for (int i = 0; i < rank; ++i) dims[static_cast<std::size_t>(i)] = i < at ? i : i + 1;
        y = ir::broadcast(g_, x, to, dims);
        break;
      }
      case 2: {
        const Dim all = product(s);
        const Sizes old = shape(x);
        y = below(2) == 0 ? ir::reshape(g_, x, {all})
                          : ir::reshape(g_, x, {old[ud], all.value() / old[ud]});
        break;
      }
      case 3: {
        std::vector<int> dims(static_cast<std::size_t>(rank));
        std::iota(dims.begin(), dims.end(), 0);
        std::shuffle(dims.begin(), dims.end(), rng_);
        y = ir::transpose(g_, x, dims);
        break;
      }
      case 4: {
        const ir::Reduce kinds[] = {ir::Reduce::sum, ir::Reduce::max, ir::Reduce::lse};
        y = bounded(ir::reduce(g_, kinds[below(3)], x, some_dims(rank)));
        break;
      }
      case 5: {
        Shape begin(s.size(), Dim(0)), end = s;
        begin[ud] = below(static_cast<int>(s[ud].value()));
        y = ir::slice(g_, x, begin, end);
        break;
      }
      case 6: {
        Shape low(s.size(), Dim(0)), high = low;
        low[ud] = below(2);
        high[ud] = below(2);
        y = ir::pad(g_, x, low, high);
        break;
      }
      case 7:
        y = g_.add(ir::Op::concat, {x, bounded(x)}, a);
        break;
      case 8: {  // a dot with itself or the last value, over one common dimension
        a = {};
        const ir::Value z = below(2) == 0 ? x : last;
        const Shape other = g_.type(z).shape;
        const auto found = std::find(other.begin(), other.end(), s[ud]);
        if (found == other.end()) return;
        a.contract_a = {d};
        a.contract_b = {static_cast<int>(found - other.begin())};
        if (ir::elements_of(g_.type(x)) * ir::elements_of(g_.type(z)) > 20000) return;
        y = bounded(g_.add(ir::Op::dot, {x, z}, a));
        break;
      }
      case 9: {  // a dot batched over d, contracted over another dimension
        if (rank < 2) return;
        a = {};
        a.batch_a = a.batch_b = {d};
        a.contract_a = a.contract_b = {(d + 1) % rank};
        y = bounded(g_.add(ir::Op::dot, {x, ir::map(g_, ir::Function::cos, {x})}, a));
        break;
      }
      case 10:
        y = g_.add(ir::Op::take, {x, index(below(2) == 0 ? Shape{size()} : Shape{2, 3})});
        break;
      case 11:
        a.type.shape = {size()};
        y = bounded(g_.add(ir::Op::scatter_add, {index({s[0]}), x}, a));
        break;
      case 12: {
        Shape to = s;
        to.erase(to.begin() + d);
        y = g_.add(ir::Op::pick, {x, index(to)}, a);
        break;
      }
      case 13: {  // a function of an element's index
        const ir::Value at = ir::iota(g_, {DType::i64, s}, d);
        const ir::Value two = ir::constant(g_, 2.0, {DType::i64, s});
        const ir::Value low = ir::map(g_, ir::Function::lt, {at, two});
        y = ir::map(g_, ir::Function::select, {low, x, ir::map(g_, ir::Function::neg, {x})});
        break;
      }
      default: {  // with a value of its rows or columns: a softmax, a norm
        const std::vector<int> kept = ir::other_dims(rank, {d});
        const ir::Value row = ir::reduce(g_, ir::Reduce::lse, x, {d});
        y = ir::map(g_, ir::Function::sub, {x, ir::broadcast(g_, row, s, kept)});
        y = ir::map(g_, ir::Function::exp, {y});
      }
    }
    values_.push_back(y);
    if (below(4) == 0 && g_.type(last).shape == g_.type(y).shape)
      values_.push_back(bounded(ir::map(g_, ir::Function::mul, {y, last})));
  }
};

TEST(Regions, OfRandomGraphsKeepTheirResults) {
  int regions = 0, phases = 0;
  for (std::uint64_t seed = 1; seed <= (kAddressSanitizer ? 60U : 150U) && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const ir::Graph g = RandomGraph(seed).make(9);
    std::mt19937 rng(static_cast<unsigned>(seed));
    for (int id = 0; id < g.size() && !HasFailure(); ++id) {
      if (g.node(id).op == ir::Op::parameter) continue;
      for (const ir::Split& s : splits_of(g.node(id).results[0])) {
        if (rng() % 3 != 0) continue;
        const ir::Region region = ir::grow_region(g, {id, 0}, s);
        if (region.nodes.empty()) continue;
        SCOPED_TRACE("node " + std::to_string(id) + " by " + text_of(s));
        ++regions;
        phases = std::max(phases, region.phases);
        expect_same(g, ir::form_loops(g, region, 1 + static_cast<std::int64_t>(rng() % 3)), seed);
      }
    }
  }
  EXPECT_GT(regions, kAddressSanitizer ? 400 : 1000);
  EXPECT_GT(phases, 1);
}

TEST(Compiled, RandomGraphsGiveTheInterpretersResults) {
  for (std::uint64_t seed = 1000; seed < 1200 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const ir::Graph g = RandomGraph(seed).make(10);
    const ir::Tensors inputs = random_inputs(g, seed);
    CompileOptions options;
    options.threads = 1 + static_cast<int>(seed % 2);
    options.chunk = seed % 4 != 0;
    options.memory_budget = seed % 2;
    const CompiledProgram program = compile(Graph::parse(ir::print(g)), options);
    EXPECT_LT(difference(execute(program, inputs), ir::interpret(g, inputs)), 1e-11)
        << ir::print(g) << program.text();
  }
}

// --- views

// Returns the offsets of a view's elements in row-major order.
Sizes offsets_of(const ir::View& v) {
  Sizes offsets, at(v.shape.size());
  for (std::int64_t n = ir::elements_of(v); n > 0; --n) {
    offsets.push_back(std::inner_product(at.begin(), at.end(), v.strides.begin(), v.offset));
    for (std::size_t d = at.size(); d-- > 0 && ++at[d] == v.shape[d];) at[d] = 0;
  }
  return offsets;
}
// Returns whether strides can express elements of this shape at these offsets.
bool strides_exist(const Sizes& offsets, const Sizes& shape) {
  ir::View v;
  v.shape = shape;
  v.offset = offsets[0];
  const Sizes steps = ir::contiguous_strides(shape);
  for (std::size_t d = 0; d < shape.size(); ++d)
    v.strides.push_back(shape[d] > 1 ? offsets[static_cast<std::size_t>(steps[d])] - offsets[0]
                                     : 0);
  return offsets_of(v) == offsets;
}

TEST(Views, ReshapeExactlyWhatStridesCanSay) {
  std::mt19937 rng(1);
  const auto below = [&](unsigned n) { return static_cast<int>(rng() % n); };
  int said = 0, refused = 0;
  for (int round = 0; round < 3000; ++round) {
    ir::View v;
    for (int d = 0; d < 3; ++d) v.shape.push_back(1 + below(4));
    v.strides = ir::contiguous_strides(v.shape);
    if (below(2) == 0) {
      Sizes begin, part;
      for (const std::int64_t size : v.shape) {
        begin.push_back(below(static_cast<unsigned>(size)));
        part.push_back(1 + below(static_cast<unsigned>(size - begin.back())));
      }
      v = ir::sliced(v, begin, part);
    }
    if (below(2) == 0) v = ir::transposed(v, {1, 2, 0});
    if (below(3) == 0) v = ir::broadcasted(v, {v.shape[0], 2, v.shape[1], v.shape[2]}, {0, 2, 3});
    // Picks any shape of as many elements.
    Sizes to;
    for (std::int64_t left = ir::elements_of(v); left > 1 || below(3) == 0;) {
      const std::int64_t size = 1 + below(4);
      if (left % size != 0) continue;
      to.push_back(size);
      left /= size;
      if (to.size() > 7) {
        to.push_back(left);
        break;
      }
    }
    const std::optional<ir::View> flat = ir::reshaped(v, to);
    const Sizes offsets = offsets_of(v);
    ASSERT_EQ(flat.has_value(), strides_exist(offsets, to));
    ASSERT_TRUE(!flat || offsets_of(*flat) == offsets);
    ++(flat ? said : refused);
    Sizes merged = v.shape, strides = v.strides;
    ir::merge_dims(merged, {&strides}, std::vector<bool>(merged.size()));
    ir::View fewer = v;
    fewer.shape = merged;
    fewer.strides = strides;
    ASSERT_EQ(offsets_of(fewer), offsets);
  }
  EXPECT_GT(said, 500);
  EXPECT_GT(refused, 500);
}

// --- memory

// Checks that live buffers do not overlap, except those that reuse memory.
void expect_apart(const ir::Program& program) {
  const auto owner = [&](std::size_t b) {
    while (program.buffers[b].shared_with >= 0)
      b = static_cast<std::size_t>(program.buffers[b].shared_with);
    return b;
  };
  for (std::size_t i = 0; i < program.buffers.size(); ++i) {
    const ir::Buffer& a = program.buffers[i];
    if (a.place != ir::Place::arena || a.first < 0) continue;
    ASSERT_TRUE(a.offset >= 0 && a.offset % 64 == 0) << a.name;
    const ir::Buffer* const result =
        a.inside < 0 ? nullptr : &program.buffers[static_cast<std::size_t>(a.inside)];
    const std::int64_t room = result == nullptr ? program.arena_bytes : result->bytes - 63;
    ASSERT_LE(a.offset + a.bytes, room) << a.name;
    ASSERT_TRUE(result == nullptr || (result->overwritten && a.last < result->first)) << a.name;
    for (std::size_t j = 0; j < i; ++j) {
      const ir::Buffer& b = program.buffers[j];
      if (b.place != ir::Place::arena || b.first < 0 || a.inside != b.inside) continue;
      if (owner(i) == owner(j)) {
        ASSERT_TRUE(a.last <= b.first || b.last <= a.first) << a.name << " and " << b.name;
        continue;
      }
      const bool live = a.first <= b.last && b.first <= a.last;
      const bool meet = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
      ASSERT_FALSE(live && meet) << a.name << " and " << b.name;
    }
  }
  for (const ir::Instruction& instruction : program.instructions) {
    const auto* found = std::get_if<ir::LoopRun>(&instruction.what);
    if (found == nullptr) continue;
    const ir::LoopRun& loop = *found;
    for (const ir::Program* inner : {loop.body.get(), loop.tail.get()}) {
      if (inner == nullptr) continue;
      ASSERT_LE(inner->arena_bytes, program.buffers[static_cast<std::size_t>(loop.arena)].bytes);
      expect_apart(*inner);
    }
  }
}

CompileOptions options_of(const NamedProgram& p, bool chunk) {
  CompileOptions options;
  options.sizes = p.sizes;
  options.chunk = chunk;
  options.memory_budget = chunk ? 1 : 0;
  options.threads = 3;
  return options;
}

TEST(Memory, OfProgramsDoesNotOverlap) {
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    for (const bool chunk : {false, true}) {
      const CompiledProgram program = compile(p.make(DType::bf16), options_of(p, chunk));
      const ir::Program lowered = ir::lower(ir::parse(program.text()).graph, ir::CpuTarget(3));
      EXPECT_EQ(static_cast<std::size_t>(lowered.arena_bytes), program.arena_bytes());
      expect_apart(lowered);
    }
  }
}

// Memory between two guards, filled with a pattern.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes) {
    const std::size_t all = (bytes + 2 * kGuard + 63) / 64 * 64;
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, all)));
    std::memset(memory_.get(), kPattern, all);
  }
  void* data() { return memory_.get() + kGuard; }
  bool whole() const {
    const unsigned char* p = memory_.get();
    return std::all_of(p, p + kGuard, same) &&
           std::all_of(p + kGuard + bytes_, p + 2 * kGuard + bytes_, same);
  }
  bool untouched() const {
    const unsigned char* p = memory_.get();
    return std::all_of(p, p + 2 * kGuard + bytes_, same);
  }

 private:
  static constexpr std::size_t kGuard = 4096;
  static constexpr unsigned char kPattern = 0x5a;
  static bool same(unsigned char byte) { return byte == kPattern; }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

TEST(Memory, OutsideOfTheArenaAndTheResultsIsNotWritten) {
  for (const NamedProgram& p : programs()) {
    for (const bool chunk : {false, true}) {
      SCOPED_TRACE(p.name + (chunk ? " chunked" : ""));
      CompileOptions options = options_of(p, chunk);
      options.threads = 1;  // more threads than cores would wait for each other
      const CompiledProgram program = compile(p.make(DType::f32), options);
      std::vector<Guarded> parameters, results;
      std::vector<const void*> in;
      std::vector<void*> out;
      for (const CompiledProgram::Tensor& t : program.parameters()) {
        parameters.emplace_back(static_cast<std::size_t>(t.bytes()));
        in.push_back(parameters.back().data());
      }
      for (const CompiledProgram::Tensor& t : program.results()) {
        results.emplace_back(static_cast<std::size_t>(t.bytes()));
        out.push_back(results.back().data());
      }
      Guarded arena(program.arena_bytes());
      program.run(in, out, arena.data());
      EXPECT_TRUE(arena.whole());
      EXPECT_FALSE(arena.untouched());
      for (const Guarded& r : results) EXPECT_TRUE(r.whole());
      for (const Guarded& r : parameters) EXPECT_TRUE(r.untouched());
    }
  }
}

}  // namespace
}  // namespace logitless::test

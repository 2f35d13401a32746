// The memory plan: live buffers do not overlap, little is wasted, and other memory is not touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/arena.h"
#include "compiler/plan/lower.h"
#include "compiler/plan/views.h"
#include "compiler/programs.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kAlignment = 64;

bool meet(const ir::Interval& a, const ir::Interval& b) {
  return a.first <= b.last && b.first <= a.last;
}

std::vector<ir::Interval> random_intervals(std::mt19937& rng, int count, int times) {
  std::vector<ir::Interval> list;
  for (int i = 0; i < count; ++i) {
    const int a = static_cast<int>(rng() % static_cast<unsigned>(times)),
              b = static_cast<int>(rng() % static_cast<unsigned>(times));
    list.push_back(
        {static_cast<std::int64_t>(64 * (1 + rng() % 9)), std::min(a, b), std::max(a, b), 0});
  }
  return list;
}

TEST(Arena, LivingBuffersDoNotOverlap) {
  std::mt19937 rng(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<ir::Interval> list = random_intervals(rng, 2 + round % 40, 20);
    const std::int64_t total = ir::assign_offsets(list, kAlignment);
    for (std::size_t i = 0; i < list.size(); ++i) {
      EXPECT_EQ(list[i].offset % kAlignment, 0);
      EXPECT_LE(list[i].offset + list[i].bytes, total);
      for (std::size_t j = 0; j < i; ++j) {
        if (!meet(list[i], list[j])) continue;
        EXPECT_TRUE(list[i].offset + list[i].bytes <= list[j].offset ||
                    list[j].offset + list[j].bytes <= list[i].offset);
      }
    }
  }
}

// Follows the definition: places the largest first, each at the lowest free offset.
std::vector<std::int64_t> lowest_places(const std::vector<ir::Interval>& list) {
  std::vector<std::size_t> order(list.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return list[a].bytes > list[b].bytes; });
  std::vector<std::int64_t> places(list.size());
  std::vector<std::size_t> done;
  for (const std::size_t i : order) {
    std::sort(done.begin(), done.end(),
              [&](std::size_t a, std::size_t b) { return places[a] < places[b]; });
    for (const std::size_t j : done) {
      if (!meet(list[i], list[j])) continue;
      if (places[j] >= places[i] + list[i].bytes) break;
      places[i] = std::max(places[i], places[j] + list[j].bytes);
    }
    done.push_back(i);
  }
  return places;
}

TEST(Arena, TakesTheLowestPlaces) {
  std::mt19937 rng(3);
  for (int round = 0; round < 60; ++round) {
    const int times = 1 + static_cast<int>(rng() % (round % 2 == 0 ? 30 : 900));
    std::vector<ir::Interval> list = random_intervals(rng, 20 + 10 * round, times);
    for (ir::Interval& x : list) {  // many are short, and some are empty
      if (rng() % 4 != 0) x.last = std::min<int>(x.last, x.first + static_cast<int>(rng() % 5));
      if (rng() % 20 == 0) x.bytes = 0;
    }
    const std::vector<std::int64_t> expected = lowest_places(list);
    ir::assign_offsets(list, kAlignment);
    for (std::size_t i = 0; i < list.size(); ++i) ASSERT_EQ(list[i].offset, expected[i]) << i;
  }
}

// Returns the best arena over all orders of placement, which is the optimum.
std::int64_t optimum(const std::vector<ir::Interval>& list) {
  std::vector<std::size_t> order(list.size());
  std::iota(order.begin(), order.end(), 0u);
  std::int64_t best = INT64_MAX;
  do {
    std::vector<ir::Interval> placed;
    std::int64_t total = 0;
    for (const std::size_t i : order) {
      ir::Interval x = list[i];
      x.offset = 0;
      for (bool moved = true; moved;) {
        moved = false;
        for (const ir::Interval& y : placed) {
          if (meet(x, y) && x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes) {
            x.offset = y.offset + y.bytes;
            moved = true;
          }
        }
      }
      total = std::max(total, x.offset + x.bytes);
      placed.push_back(x);
    }
    best = std::min(best, total);
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

TEST(Arena, IsNearTheOptimum) {
  std::mt19937 rng(2);
  int same = 0;
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<ir::Interval> list = random_intervals(rng, 6, 8);
    const std::int64_t best = optimum(list), ours = ir::assign_offsets(list, kAlignment);
    EXPECT_GE(ours, best);
    EXPECT_LE(3 * ours, 4 * best);
    same += ours == best ? 1 : 0;
  }
  EXPECT_GE(same, 85);
}

TEST(Arena, HoldsBuffersWhileTheyLive) {
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    CompileOptions options;
    options.sizes = p.sizes;
    const CompiledProgram compiled = compile(p.make(DType::f32), options);
    // Runs over a poisoned arena of exact size, with a guard behind it.
    const ir::Graph graph = ir::parse(p.make(DType::f32).text()).graph;
    const ir::Tensors inputs = random_inputs(ir::bind(graph, p.sizes), 5);
    const ir::Tensors once = execute(compiled, inputs);
    for (const auto& [name, t] : once) {
      for (const double v : t.data)
        ASSERT_FALSE(std::isnan(v)) << name << " was read before it was written";
    }
  }
}

// --- memory of results

const char* const kTwoProducts =
    "graph g(%x: f32[100, 40], %w: f32[40, 300], %v: f32[300, 40], %u: f32[40, 400]) { "
    "%z = dot %x, %w contract(1; 0) %p = dot %z, %v contract(1; 0) "
    "%y = dot %p, %u contract(1; 0) return y: %y }";
constexpr std::size_t kBytesOfZ = 100 * 300 * 4;

TEST(ResultMemory, HoldsValuesUntilTheResultIsMade) {
  const Graph graph = Graph::parse(kTwoProducts);
  const CompiledProgram program = compile(graph);
  EXPECT_LT(program.arena_bytes(), kBytesOfZ) << program.explain();
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
  EXPECT_LT(difference(execute(program, inputs), ir::interpret(GraphAccess::of(graph), inputs)),
            1e-5);
}

TEST(ResultMemory, WithSumsOfTheCallersIsKept) {
  CompileOptions options;
  options.added = {"y"};
  const Graph graph = Graph::parse(kTwoProducts);
  const CompiledProgram program = compile(graph, options);
  EXPECT_GE(program.arena_bytes(), kBytesOfZ);
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
  const ir::Tensors before = random_sums(program, 4);
  const ir::Tensors expected = sum(ir::interpret(GraphAccess::of(graph), inputs), before);
  EXPECT_LT(difference(execute(program, inputs, nullptr, before), expected), 1e-5);
}

// The memory of a result may begin at any element.
TEST(ResultMemory, OfAnyAlignment) {
  const Graph graph = Graph::parse(kTwoProducts);
  const CompiledProgram program = compile(graph);
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
  std::vector<std::vector<float>> given;
  std::vector<const void*> parameters;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    const std::vector<double>& data = inputs.at(t.name).data;
    parameters.push_back(given.emplace_back(data.begin(), data.end()).data());
  }
  std::vector<std::byte> arena(program.arena_bytes() + kAlignment);
  const auto begin = reinterpret_cast<std::uintptr_t>(arena.data());
  void* const at = arena.data() + (kAlignment - begin % kAlignment) % kAlignment;
  constexpr std::size_t kElements = 100 * 400, kGuard = 64;
  std::vector<float> first;
  for (std::size_t offset = 0; offset < kGuard; ++offset) {
    std::vector<float> memory(kElements + kGuard, 7.0f);
    void* const result = memory.data() + offset;
    program.run(parameters, std::span(&result, 1), at);
    for (std::size_t i = 0; i < memory.size(); ++i) {
      if (i < offset || i >= offset + kElements) {
        ASSERT_EQ(memory[i], 7.0f) << offset << ", " << i;
      }
    }
    memory.erase(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(offset));
    memory.resize(kElements);
    if (first.empty()) first = memory;
    ASSERT_EQ(memory, first) << offset;
  }
}

std::int64_t at(const ir::View& v, const std::vector<std::int64_t>& index) {
  std::int64_t offset = v.offset;
  for (std::size_t d = 0; d < index.size(); ++d) offset += index[d] * v.strides[d];
  return offset;
}
ir::View whole(const std::vector<std::int64_t>& shape) {
  ir::View v;
  v.shape = shape;
  v.strides = ir::contiguous_strides(shape);
  return v;
}

TEST(Views, MoveNothing) {
  const ir::View x = whole({3, 4, 5});
  EXPECT_EQ(at(ir::transposed(x, {2, 0, 1}), {4, 1, 2}), at(x, {1, 2, 4}));
  EXPECT_EQ(at(ir::sliced(x, {1, 0, 2}, {2, 4, 3}), {1, 3, 2}), at(x, {2, 3, 4}));
  EXPECT_EQ(at(ir::broadcasted(whole({4}), {3, 4, 5}, {1}), {2, 3, 4}), 3);
  const std::optional<ir::View> flat = ir::reshaped(x, {12, 5});
  ASSERT_TRUE(flat);
  EXPECT_EQ(at(*flat, {7, 3}), at(x, {1, 3, 3}));
  EXPECT_FALSE(ir::reshaped(ir::transposed(x, {1, 0, 2}), {12, 5}));
  const std::optional<ir::View> inner =
      ir::reshaped(ir::transposed(x, {1, 0, 2}), {4, 15 / 5, 5, 1});
  ASSERT_TRUE(inner);
  EXPECT_EQ(at(*inner, {3, 2, 4, 0}), at(x, {2, 3, 4}));
}

// --- bytes read and written

double moved(const std::string& text) {
  return ir::bytes_moved(ir::lower(ir::parse(text).graph, ir::CpuTarget(1)));
}

TEST(BytesMoved, OfEachOperandAndResultOnce) {
  const std::string x = "graph g(%x: f32[6, 4], %w: f32[4, 3], %b: bf16[3], %t: i64[6]) { ";
  EXPECT_EQ(moved(x + "%y = dot %x, %w contract(1; 0) return y: %y }"), 4 * (24 + 12 + 18));
  // A broadcast row counts once, and intermediate values do not count.
  EXPECT_EQ(moved(x + "%c = cast %b : f32[3] %e = exp %c %y = broadcast %e dims(1) : f32[6, 3] %z "
                      "= broadcast %b dims(1) : bf16[6, 3] %f = cast %z : f32[6, 3] %s = add %y, "
                      "%f return s: %s }"),
            2 * 3 + 4 * 3 + 4 * 3 + 2 * 3 + 4 * 18);
  EXPECT_EQ(moved(x + "%y = take %w, %t return y: %y }"), 8 * 6 + 2 * 4 * 18);
  EXPECT_EQ(moved(x + "%y = reduce_sum %x dims(1) return y: %y }"), 4 * (24 + 6));
}

TEST(BytesMoved, OfAllRoundsOfALoop) {
  // 5 rows in chunks of 2: each chunk reads the weight, and reads and writes the sum.
  const double rows = 4 * 3 * 5, weight = 4 * 3, sum = 4.0;
  EXPECT_EQ(moved("graph g(%x: f32[5, 3], %w: f32[3]) { %y = loop c extent(5) chunk(2) (%first, %p "
                  "= slice %x axis(0) factor(1), %q = whole %w) { %d = dot %p, %q contract(1; 0) "
                  "%e = reduce_sum %d dims(0) return s: sum %e } return y: %y }"),
            sum + rows + 3 * weight + 2 * (4 * 5) + 3 * 2 * sum);
}

}  // namespace
}  // namespace logitless::test

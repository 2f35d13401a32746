// The order of instructions: optimal by brute force, never worse than the given one, with equal
// bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>

#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/lower.h"
#include "compiler/plan/schedule.h"
#include "compiler/programs.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"

namespace logitless::test {
namespace {

using Order = std::vector<int>;

// --- schedules

// Returns steps that make a value from earlier ones, and steps that add to an earlier value.
ir::Schedule random_schedule(std::mt19937& rng, int count) {
  const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  ir::Schedule s;
  for (int i = 0; i < count; ++i) {
    std::vector<int> values, after;
    std::vector<ir::Schedule::Take> takes;
    const int made = static_cast<int>(s.bytes.size());
    for (int k = i > 0 ? below(3) : 0; k > 0; --k) {
      const int before = below(i);
      after.push_back(before);
      const std::span<const int> there = s.values[static_cast<std::size_t>(before)];
      if (!there.empty()) values.push_back(there.back());
    }
    const auto unique = [](std::vector<int>& list) {
      std::sort(list.begin(), list.end());
      list.erase(std::unique(list.begin(), list.end()), list.end());
    };
    unique(after);
    unique(values);
    if (below(4) > 0) {  // the others write the caller's memory
      const int from = values.empty() ? -1 : values.front();
      const bool over = from >= 0 && below(2) == 0;
      s.bytes.push_back(over ? s.bytes[static_cast<std::size_t>(from)] : 64 * (1 + below(6)));
      if (over) takes.emplace_back(from, made);
      values.push_back(made);
    }
    s.add(values, after, takes);
  }
  return s;
}

bool is_allowed(const ir::Schedule& s, const Order& order) {
  std::vector<int> place(order.size(), -1);
  for (std::size_t i = 0; i < order.size(); ++i)
    place[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (place[i] < 0) return false;
    for (const int before : s.after[i]) {
      if (place[static_cast<std::size_t>(before)] > place[i]) return false;
    }
  }
  return true;
}

// Follows the definition: a value is live from the first to the last step that names it.
std::int64_t peak_by_definition(const ir::Schedule& s, const Order& order) {
  std::int64_t peak = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto names = [&](std::size_t at, int v) {
      const std::span<const int> values = s.values[static_cast<std::size_t>(order[at])];
      return std::find(values.begin(), values.end(), v) != values.end();
    };
    const auto first = [&](int v) {
      std::size_t at = 0;
      while (!names(at, v)) ++at;
      return at;
    };
    const auto last = [&](int v) {
      std::size_t at = order.size() - 1;
      while (!names(at, v)) --at;
      return at;
    };
    std::int64_t live = 0;
    for (int v = 0; v < static_cast<int>(s.bytes.size()); ++v)
      live += first(v) <= i && i <= last(v) ? s.bytes[static_cast<std::size_t>(v)] : 0;
    for (const auto& [from, to] : s.takes[static_cast<std::size_t>(order[i])]) {
      if (last(from) != i || first(to) != i) continue;
      live -= s.bytes[static_cast<std::size_t>(to)];
      break;
    }
    peak = std::max(peak, live);
  }
  return peak;
}

std::int64_t optimum(const ir::Schedule& s) {
  Order order(s.steps());
  std::iota(order.begin(), order.end(), 0);
  std::int64_t best = INT64_MAX;
  do {
    if (is_allowed(s, order)) best = std::min(best, ir::peak_of(s, order));
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

Order given(const ir::Schedule& s) {
  Order order(s.steps());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

TEST(Schedule, CountsWhatLives) {
  std::mt19937 rng(1);
  for (int round = 0; round < 100; ++round) {
    const ir::Schedule s = random_schedule(rng, 10);
    EXPECT_EQ(ir::peak_of(s, given(s)), peak_by_definition(s, given(s)));
  }
}

TEST(Schedule, IsTheOptimumOfFewSteps) {
  std::mt19937 rng(2);
  int lower = 0;
  for (int round = 0; round < 150; ++round) {
    const ir::Schedule s = random_schedule(rng, 4 + round % 4);
    const Order order = ir::order_of_least_peak(s);
    ASSERT_TRUE(is_allowed(s, order));
    ASSERT_EQ(ir::peak_of(s, order), optimum(s)) << round;
    lower += ir::peak_of(s, order) < ir::peak_of(s, given(s)) ? 1 : 0;
  }
  EXPECT_GT(lower, 20);
}

TEST(Schedule, OfManyStepsIsAllowedAndNoHigher) {
  std::mt19937 rng(3);
  int lower = 0;
  for (int round = 0; round < 40; ++round) {
    const ir::Schedule s = random_schedule(rng, 40 + 10 * round);
    const Order order = ir::order_of_least_peak(s);
    ASSERT_TRUE(is_allowed(s, order));
    ASSERT_LE(ir::peak_of(s, order), ir::peak_of(s, given(s)));
    lower += ir::peak_of(s, order) < ir::peak_of(s, given(s)) ? 1 : 0;
  }
  EXPECT_GT(lower, 30);
}

// The given order stays if no other is lower.
TEST(Schedule, MovesNothingInVain) {
  ir::Schedule s;
  s.bytes = {64, 64, 64};
  const auto add = [&](std::vector<int> values, std::vector<int> after) {
    s.add(values, after, {});
  };
  add({0}, {});
  add({1}, {});
  add({0, 1, 2}, {0, 1});
  EXPECT_EQ(ir::order_of_least_peak(s), (Order{0, 1, 2}));
}

// --- programs

ir::Program lowered(const ir::Graph& graph, ir::InstructionOrder order) {
  return ir::lower(graph, ir::CpuTarget(1), {}, order);
}

std::string names_of(const ir::Program& program) {
  std::string names;
  for (const ir::Instruction& i : program.instructions) names += i.name + " ";
  return names;
}

// The last read of the activation precedes its gradient.
TEST(OrderForMemory, GradientsOfWeightsComeBeforeThoseOfActivations) {
  const ir::Graph graph =
      ir::parse(
          "graph g(%x: f32[64, 8], %w: f32[8, 256], %v: f32[256, 8], %d: f32[64, 8]) {"
          "%h = dot %x, %w contract(1; 0) %o = constant value(0) : f32[64, 256] %a = max %h, %o "
          "%y = dot %a, %v contract(1; 0) %d_a = dot %d, %v contract(1; 1) "
          "%d_v = dot %a, %d contract(0; 0) %s = sign %h %d_h = mul %d_a, %s "
          "%d_w = dot %x, %d_h contract(0; 0) return y: %y, d_v: %d_v, d_w: %d_w }")
          .graph;
  const ir::Program before = lowered(graph, ir::InstructionOrder::given);
  const ir::Program after = lowered(graph, ir::InstructionOrder::for_memory);
  EXPECT_EQ(names_of(before), "h a y d_a d_v d_h d_w ");
  EXPECT_EQ(names_of(after), "h a y d_v d_a d_h d_w ");
  EXPECT_EQ(before.value_bytes, 3 * 64 * 256 * 4);
  EXPECT_EQ(after.value_bytes, 2 * 64 * 256 * 4);
}

CompileOptions options_of(const Bindings& sizes, bool chunk) {
  CompileOptions options;
  options.sizes = sizes;
  options.chunk = chunk;
  options.memory_budget = chunk ? 1 : 0;
  options.threads = 1;  // more threads than cores would wait for each other
  return options;
}

// Returns the program with its instructions in the order of the nodes.
CompiledProgram in_given_order(const CompiledProgram& program) {
  auto state = std::make_shared<CompiledProgram::State>(CompilerAccess::state(program));
  state->program = lowered(state->graph, ir::InstructionOrder::given);
  return CompilerAccess::make(std::move(state));
}

void expect_same_bits(const CompiledProgram& program, std::uint64_t seed) {
  const ir::Tensors inputs = random_inputs(CompilerAccess::state(program).graph, seed);
  const ir::Tensors expected = execute(in_given_order(program), inputs);
  for (const auto& [name, tensor] : execute(program, inputs))
    EXPECT_EQ(tensor.data, expected.at(name).data) << name;
}

// The activation and its gradient both read the sigmoid of this gelu, and each computes it. So only
// one of them is live beside the hidden values.
Graph gelu_mlp(DType dtype) {
  Graph g("gelu_mlp");
  const Value x = g.parameter("x", dtype, {256, 16}), up = g.parameter("up", dtype, {16, 512}),
              down = g.parameter("down", dtype, {512, 16});
  const Value h = matmul(x, up);
  const Value y = matmul(h * sigmoid(h * 1.702), down);
  const Value loss = sum(square(y), {0, 1});
  g.result("loss", loss);
  const std::vector<Value> grads = g.gradients({loss}, {x, up, down});
  for (std::size_t i = 0; i < grads.size(); ++i) g.result("d" + std::to_string(i), grads[i]);
  return g;
}

TEST(Recompute, WhatTwoReadersWouldKeepAtThePeak) {
  const CompiledProgram program = compile(gelu_mlp(DType::f32), options_of({}, false));
  const std::int64_t hidden = 256 * 512 * 4, small = 256 * 16 * 4;
  const ir::Graph& graph = CompilerAccess::state(program).graph;
  EXPECT_GE(lowered(graph, ir::InstructionOrder::given).value_bytes, 3 * hidden);
  const ir::Program& made = CompilerAccess::state(program).program;
  EXPECT_LE(made.value_bytes, 2 * hidden + 2 * small);
  EXPECT_LE(ir::predicted_seconds(made, ir::CpuTarget(1).rates()),
            1.1 * ir::predicted_seconds(lowered(graph, ir::InstructionOrder::given),
                                        ir::CpuTarget(1).rates()));
  expect_same_bits(program, 5);
}

TEST(Recompute, WhatTheChunksOfALoopKeep) {
  CompileOptions options = options_of({}, true);
  options.memory_budget = 0;
  options.chunks = 4;
  const CompiledProgram program = compile(gelu_mlp(DType::f32), options);
  const std::int64_t hidden = 256 * 512 * 4 / 4, small = 256 * 16 * 4;
  EXPECT_LE(CompilerAccess::state(program).program.value_bytes, 2 * hidden + 2 * small);
  expect_same_bits(program, 5);
}

// Values that memory rounds to 16 bits are not recomputed.
TEST(Recompute, NothingThatMemoryRounds) {
  const CompiledProgram program = compile(gelu_mlp(DType::bf16), options_of({}, false));
  expect_same_bits(program, 5);
}

void expect_no_worse(const ir::Graph& graph) {
  const ir::Program before = lowered(graph, ir::InstructionOrder::given);
  const ir::Program after = lowered(graph, ir::InstructionOrder::for_memory);
  EXPECT_LE(after.value_bytes, before.value_bytes);
  EXPECT_EQ(after.multiply_adds, before.multiply_adds);
}

TEST(OrderForMemory, IsNeverWorse) {
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    for (const bool chunk : {false, true})
      expect_no_worse(
          CompilerAccess::state(compile(p.make(DType::bf16), options_of(p.sizes, chunk))).graph);
  }
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    expect_no_worse(GraphAccess::of(random_program(seed)));
  }
}

TEST(OrderForMemory, KeepsTheBits) {
  int moved = 0;
  const auto check = [&](const CompiledProgram& program, std::uint64_t seed) {
    expect_same_bits(program, seed);
    moved += names_of(CompilerAccess::state(program).program) !=
                     names_of(CompilerAccess::state(in_given_order(program)).program)
                 ? 1
                 : 0;
  };
  int index = 0;
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    check(compile(p.make(DType::f32), options_of(p.sizes, false)), 7);
    if (index++ % 4 == 0) check(compile(p.make(DType::bf16), options_of(p.sizes, true)), 7);
  }
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(seed);
    check(compile(random_program(seed), options_of({}, seed % 2 == 0)), seed);
  }
  EXPECT_GT(moved, 0);
}

}  // namespace
}  // namespace logitless::test

// Row groups on a GPU: loops over the same rows and columns fused into one kernel, against the
// float64 interpreter.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <algorithm>

#include "compiler/compiled.h"
#include "compiler/far_programs.h"
#include "compiler/graph_access.h"
#include "compiler/plan/group_rows.h"
#include "compiler/programs.h"
#include "compiler/run.h"
#include "compiler/target/cuda.h"
#include "cuda/run_program.h"

namespace logitless::test {
namespace {

CompileOptions for_gpu() {
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  if (const auto device = gpu()) options.device = *device;
  return options;
}

// A residual, its layer norm, a second reduction, and all gradients.
Graph norms(std::int64_t rows, std::int64_t columns, DType dtype) {
  Graph graph("norms");
  const auto parameter = [&](const char* name, const Shape& shape) {
    return graph.parameter(name, dtype, shape);
  };
  const Value x = parameter("x", {rows, columns}), y = parameter("y", {rows, columns});
  const Value gain = graph.parameter("gain", DType::f32, {columns});
  const Value shift = graph.parameter("shift", DType::f32, {columns});
  const Value sum = x + y;
  const Value normed = layer_norm(cast(sum, DType::f32), gain, shift);
  const Value out = cast(normed, dtype);
  const Value weights = parameter("weights", {rows, columns});
  const Value loss = logitless::sum(
      logitless::sum(cast(out * weights, DType::f32), {1}) + logsumexp(cast(sum, DType::f32), {1}),
      {0});
  graph.result("out", out);
  graph.result("loss", loss);
  const std::vector<Value> gradients = graph.gradients({loss}, {x, y, gain, shift});
  const char* names[] = {"d_x", "d_y", "d_gain", "d_shift"};
  for (std::size_t i = 0; i < 4; ++i) graph.result(names[i], gradients[i]);
  return graph;
}

// A gated MLP as in Llama, and all gradients.
Graph gated(std::int64_t rows, std::int64_t inner, DType dtype) {
  Graph graph("gated");
  constexpr std::int64_t kDim = 64;
  const auto parameter = [&](const char* name, const Shape& shape) {
    return graph.parameter(name, dtype, shape);
  };
  const Value x = parameter("x", {rows, kDim}), gate = parameter("gate", {kDim, inner});
  const Value up = parameter("up", {kDim, inner}), down = parameter("down", {inner, kDim});
  const Value g = matmul(x, gate);
  const Value y = matmul(g * sigmoid(g) * matmul(x, up), down);
  const Value weights = parameter("weights", {rows, kDim});
  const Value loss = logitless::sum(logitless::sum(cast(y * weights, DType::f32), {1}), {0});
  graph.result("loss", loss);
  const std::vector<Value> gradients = graph.gradients({loss}, {x, gate, up, down});
  const char* names[] = {"d_x", "d_gate", "d_up", "d_down"};
  for (std::size_t i = 0; i < 4; ++i) graph.result(names[i], gradients[i]);
  return graph;
}

const ir::Program& program_of(const CompiledProgram& compiled) {
  return CompilerAccess::state(compiled).program;
}

std::vector<const ir::RowGroup*> groups_of(const ir::Program& program) {
  std::vector<const ir::RowGroup*> groups;
  for (const ir::Instruction& i : program.instructions) {
    if (const auto* group = std::get_if<ir::RowGroup>(&i.what)) groups.push_back(group);
  }
  return groups;
}

// Runs without a GPU, too.
TEST(RowGroups, TakeALayerNormInOne) {
  const CompiledProgram compiled = compile(norms(256, 768, DType::f32), for_gpu());
  const auto groups = groups_of(program_of(compiled));
  ASSERT_FALSE(groups.empty()) << compiled.text();
  std::size_t most = 0;
  int columns = 0, dropped = 0;
  for (const ir::RowGroup* group : groups) {
    EXPECT_EQ(group->rows, 256);
    EXPECT_EQ(group->columns, 768);
    most = std::max(most, group->stages.size());
    for (const ir::RowGroup::Stage& stage : group->stages) {
      columns += ir::kind_of(stage.loop) == ir::StageKind::column_sum ? 1 : 0;
      dropped += stage.stored ? 0 : 1;
    }
  }
  EXPECT_GE(most, 5u);
  EXPECT_GE(columns, 1);
  EXPECT_GE(dropped, 3);
  // A CPU's program has none.
  EXPECT_TRUE(groups_of(program_of(compile(norms(256, 768, DType::f32)))).empty());
}

// The gradient of `down` is between them: its GEMM waits.
TEST(RowGroups, TakeAGatedMlpsBackwardInOne) {
  const CompiledProgram compiled = compile(gated(512, 1024, DType::bf16), for_gpu());
  std::size_t most = 0;
  for (const ir::RowGroup* group : groups_of(program_of(compiled))) {
    const auto stored = std::count_if(group->stages.begin(), group->stages.end(),
                                      [](const auto& stage) { return stage.stored; });
    most = std::max(most, static_cast<std::size_t>(stored));
  }
  EXPECT_EQ(most, 3u) << "the product with `down` again, and two gradients\n" << compiled.text();
}

// A layer with bias and tanh on a residual and its layer norm, and all gradients. The GEMM adds the
// bias, so that tanh's loops are over elements in order.
Graph layers(std::int64_t rows, DType dtype) {
  Graph graph("layers");
  constexpr std::int64_t kDim = 64, kInner = 96;
  const auto parameter = [&](const char* name, const Shape& shape, DType of) {
    return graph.parameter(name, of, shape);
  };
  const Value x = parameter("x", {rows, kDim}, dtype), y = parameter("y", {rows, kDim}, dtype),
              gain = parameter("gain", {kDim}, DType::f32),
              shift = parameter("shift", {kDim}, DType::f32),
              up = parameter("up", {kDim, kInner}, dtype),
              bias = parameter("bias", {kInner}, dtype), back = parameter("back", {kDim}, dtype),
              down = parameter("down", {kInner, kDim}, dtype);
  const Value before = x + (y + back);
  const Value normed = cast(layer_norm(cast(before, DType::f32), gain, shift), dtype);
  const Value inner = tanh(matmul(normed, up) + bias);
  const Value out = before + matmul(inner, down);
  const Value weights = parameter("weights", {rows, kDim}, dtype);
  const Value loss = logitless::sum(logitless::sum(cast(out * weights, DType::f32), {1}), {0});
  graph.result("loss", loss);
  const std::vector<Value> gradients =
      graph.gradients({loss}, {x, y, gain, shift, up, bias, back, down});
  const char* names[] = {"d_x", "d_y", "d_gain", "d_shift", "d_up", "d_bias", "d_back", "d_down"};
  for (std::size_t i = 0; i < 8; ++i) graph.result(names[i], gradients[i]);
  return graph;
}

int column_sums_of(const ir::RowGroup& group) {
  return static_cast<int>(std::count_if(
      group.stages.begin(), group.stages.end(),
      [](const auto& stage) { return ir::kind_of(stage.loop) == ir::StageKind::column_sum; }));
}

// Column sums after a GEMM, over elements in order; and those of a layer norm's gradient.
TEST(RowGroups, TakeTheSumsOfColumnsOfBiases) {
  const CompiledProgram compiled = compile(layers(512, DType::bf16), for_gpu());
  int alone = 0, in_inner = 0, all = 0;
  for (const ir::Instruction& i : program_of(compiled).instructions) {
    if (const auto* loop = std::get_if<ir::Pointwise>(&i.what)) alone += loop->columns ? 1 : 0;
    if (const auto* group = std::get_if<ir::RowGroup>(&i.what)) {
      all += column_sums_of(*group);
      if (group->columns == 96) in_inner += column_sums_of(*group);
    }
  }
  EXPECT_EQ(alone, 0) << compiled.text();
  EXPECT_EQ(in_inner, 1);
  EXPECT_EQ(all, 4) << compiled.text();
}

struct Results {
  ir::Tensors found, wanted;
};

// Runs a program that has row groups on the GPU, twice with the same bits, and by the interpreter.
Results results_of(const Graph& graph, std::uint64_t seed = 7) {
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), {});
  const ir::Tensors inputs = random_inputs(plain, seed);
  const CompiledProgram compiled = compile(graph, for_gpu());
  EXPECT_FALSE(groups_of(program_of(compiled)).empty()) << compiled.text();
  Results results{execute_on_gpu(compiled, inputs), ir::interpret(plain, inputs)};
  EXPECT_EQ(difference(execute_on_gpu(compiled, inputs, 2), results.found), 0.0);
  return results;
}

void expect_agreement(const Results& results, double bound) {
  EXPECT_LT(difference(results.found, results.wanted), bound);
}

TEST(RowGroups, OfLayersAgreeWithTheInterpreter) {
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  for (const std::int64_t rows : {64, 4104}) {  // enough parts for a block of more threads
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(testing::Message() << rows << ' ' << name_of(dtype));
      const Results results = results_of(layers(rows, dtype));
      for (const auto& [name, value] : results.wanted) {
        if (name == "loss") continue;  // a sum that cancels
        EXPECT_LT(relative_2norm(results.found.at(name), value), dtype == DType::f32 ? 2e-5 : 0.025)
            << name;
      }
    }
  }
}

TEST(RowGroups, OfAGatedMlpAgreeWithTheInterpreter) {
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  for (const std::int64_t inner : {256, 264}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(testing::Message() << inner << ' ' << name_of(dtype));
      expect_agreement(results_of(gated(128, inner, dtype)), dtype == DType::f32 ? 2e-5 : 0.03);
    }
  }
}

TEST(RowGroups, AreNotMadeOfFewRowsOrVeryLongOnes) {
  CompileOptions ampere;
  ampere.device.kind = DeviceKind::cuda;
  ampere.device.compute_capability = 80;
  CompileOptions hopper = ampere;
  hopper.device.compute_capability = 90;
  const auto none = [](std::int64_t rows, std::int64_t columns, const CompileOptions& options) {
    return groups_of(program_of(compile(norms(rows, columns, DType::f32), options))).empty();
  };
  EXPECT_TRUE(none(8, 768, hopper));
  EXPECT_TRUE(none(256, 50257, ampere));
  EXPECT_FALSE(none(256, 50257, hopper));
  EXPECT_TRUE(none(256, 400000, hopper));
}

TEST(RowGroups, OfLongRowsAgreeWithTheInterpreter) {
  if (!gpu() || gpu()->compute_capability < 90) GTEST_SKIP() << "no GPU with clusters";
  for (const std::int64_t columns : {8193, 16384, 50257, 65536, 128256, 262208}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(testing::Message() << columns << ' ' << name_of(dtype));
      expect_agreement(results_of(long_rows(66, columns, dtype)),
                       dtype == DType::f32 ? 2e-5 : 0.03);
    }
  }
}

TEST(RowGroups, AgreeWithTheInterpreter) {
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  for (const std::int64_t rows : {64, 1025}) {
    for (const std::int64_t columns : {8, 37, 100, 256, 768, 1000, 3072, 8192}) {
      if (rows > 64 && columns > 1000) continue;
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        if (dtype == DType::f16 && columns != 768) continue;
        SCOPED_TRACE(testing::Message() << rows << " x " << columns << ' ' << name_of(dtype));
        const double bound = dtype == DType::f32 ? 2e-5 : dtype == DType::f16 ? 4e-3 : 0.03;
        expect_agreement(
            results_of(norms(rows, columns, dtype), static_cast<std::uint64_t>(columns)), bound);
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test

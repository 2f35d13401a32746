// Lowering depends on a machine only through its Target.
#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "compiler/analysis/split.h"
#include "compiler/exec/cpu/backend.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/lower.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"
#include "compiler/target/cuda.h"

namespace logitless::test {
namespace {

// A target that differs from this machine.
class OtherTarget final : public ir::Target {
 public:
  std::int64_t alignment() const final { return 256; }
  std::int64_t row_alignment() const final { return 1; }
  std::int64_t chunk_multiple() const final { return 1; }
  bool strided_gemms() const final { return true; }
  bool uses_results() const final { return true; }
  std::string refuse(const ir::Instruction& instruction) const final {
    return std::holds_alternative<ir::Pick>(instruction.what) ? "pick: not here" : "";
  }
  std::int64_t scratch_bytes(const ir::Gemm& gemm) const final { return 1000 * gemm.k; }
  std::int64_t scratch_bytes(const ir::Attention&) const final { return 0; }
  std::int64_t scratch_bytes(const ir::ScatterAdd&) const final { return 0; }
  std::int64_t scratch_bytes(const ir::RowGroup&) const final { return 0; }
  std::int64_t most_group_columns() const final { return 0; }
  bool heads_add() const final { return false; }
  bool epilogues() const final { return false; }
  bool gelu_epilogues() const final { return false; }
  std::optional<ir::ProductEngine> product_engine() const final { return std::nullopt; }
  std::int64_t parts_bytes(const ir::Pointwise&) const final { return 0; }
  ir::HeadPlan head_plan(const HeadShape&, const HeadFeatures&, std::int64_t) const final {
    return {};
  }
  ir::Rates rates() const final { return {1.0, 1.0, 1.0, 1.0, 1.0, 1.0}; }
  std::int64_t thick_rows() const final { return 1; }
};

TEST(Lowering, AsksTheTarget) {
  const ir::Program program = ir::lower(
      ir::parse("graph g(%a: f32[3, 5], %b: f32[5, 7]) { %c = dot %a, %b contract(1; 0) %d = dot "
                "%c, %b contract(1; 1) return d: %d }")
          .graph,
      OtherTarget());
  EXPECT_EQ(program.alignment, 256);
  int scratch = 0;
  for (const ir::Buffer& b : program.buffers) {
    EXPECT_EQ(b.offset % 256, 0) << b.name;
    if (b.name.ends_with(" scratch")) {
      EXPECT_EQ(b.bytes, scratch++ == 0 ? 5000 : 7000);
    }
  }
  EXPECT_EQ(scratch, 2);
}

// Row strides of a product's operands and result.
struct RowSteps {
  std::int64_t a = 0, b = 0, c = 0;
  bool operator==(const RowSteps&) const = default;
};
std::vector<RowSteps> steps_of(const ir::Program& program) {
  std::vector<RowSteps> list;
  for (const ir::Instruction& i : program.instructions) {
    const auto* g = std::get_if<ir::Gemm>(&i.what);
    if (g != nullptr) list.push_back({g->a.strides[0], g->b.strides[0], g->c.strides[0]});
  }
  return list;
}

TEST(Lowering, PutsRowsOfProductsWhereTheTargetWantsThem) {
  // Rows of 300 f32 and of 301 bf16 numbers: 1200 and 602 bytes.
  const std::string text =
      "graph g(%x: bf16[40, 24], %w: bf16[24, 301], %v: bf16[301, 300]) {\n"
      "  %z = dot %x, %w contract(1; 0) : bf16[40, 301]\n  %t = tanh %z : bf16[40, 301]\n"
      "  %y = dot %t, %v contract(1; 0) : f32[40, 300]\n  %s = mul %y, %y : f32[40, 300]\n"
      "  %n = reduce_sum %s dims(1) : f32[40]\n  return n: %n\n}\n";
  const ir::Graph graph = ir::parse(text).graph;
  EXPECT_EQ(steps_of(ir::lower(graph, ir::CudaTarget(90))),
            (std::vector<RowSteps>{{24, 301, 304}, {304, 300, 300}}));
  EXPECT_EQ(steps_of(ir::lower(graph, OtherTarget())),
            (std::vector<RowSteps>{{24, 301, 301}, {301, 300, 300}}));
}

TEST(Lowering, LeavesRowsTogetherForThoseThatWantThemSo) {
  const auto steps = [](const std::string& rest, const std::string& results) {
    return steps_of(
        ir::lower(ir::parse("graph g(%x: bf16[40, 24], %w: bf16[24, 301], %i: i64[5]) {\n"
                            "  %z = dot %x, %w contract(1; 0) : bf16[40, 301]\n" +
                            rest + "  return " + results + "\n}\n")
                      .graph,
                  ir::CudaTarget(90)))[0];
  };
  // Not aligned: a result; a value that is read in another shape; a table of rows.
  EXPECT_EQ(steps("", "z: %z").c, 301);
  EXPECT_EQ(
      steps("  %r = reshape %z : bf16[12040]\n  %s = reduce_sum %r dims(0) : f32[]\n", "s: %s").c,
      301);
  EXPECT_EQ(steps("  %r = take %z, %i\n", "r: %r").c, 301);
  // Aligned: only the first dimensions differ.
  EXPECT_EQ(steps("  %r = reshape %z : bf16[8, 5, 301]\n"
                  "  %s = reduce_sum %r dims(2) : f32[8, 5]\n",
                  "s: %s")
                .c,
            304);
}

// A loop over 40 rows in chunks of 16 and its last round of 8: each reads a part of a value whose
// rows have gaps, and stacks one that is multiplied after it.
std::vector<ir::Program> loop_of(const std::string& body, const std::string& after) {
  const ir::Program all = ir::lower(
      ir::parse("graph g(%x: bf16[40, 301], %v: bf16[301, 64], %w: bf16[40, 32]) {\n"
                "  %t = tanh %x : bf16[40, 301]\n  %u = mul %t, %t : bf16[40, 301]\n"
                "  %y = loop c extent(40) chunk(16) (%first, %p = slice %u axis(0) factor(1), "
                "%q = whole %v) {\n" +
                body + "    return y: stack %y axis(0) factor(1)\n  }\n" + after)
          .graph,
      ir::CudaTarget(90));
  std::vector<ir::Program> parts = {all};
  for (const ir::Instruction& i : all.instructions) {
    const auto* loop = std::get_if<ir::LoopRun>(&i.what);
    if (loop == nullptr) continue;
    parts.push_back(*loop->body);
    parts.push_back(*loop->tail);
  }
  return parts;
}

TEST(Lowering, PutsRowsOfLoopsWhereTheTargetWantsThem) {
  using Steps = std::vector<RowSteps>;
  const std::string products = "  %d = dot %y, %w contract(0; 0) : bf16[301, 32]\n";
  // The stacked rows of the result, which a product reads, and what the body multiplies.
  std::vector<ir::Program> parts = loop_of(
      "    %z = dot %p, %q contract(1; 0) : bf16[c, 64]\n"
      "    %b = dot %z, %q contract(1; 1) : bf16[c, 301]\n    %y = exp %b\n",
      products + "  return d: %d\n}\n");
  EXPECT_EQ(steps_of(parts.at(0)), (Steps{{1, 32, 32}}));
  for (const std::size_t round : {1u, 2u}) {
    const Steps steps = steps_of(parts.at(round));
    ASSERT_EQ(steps.size(), 2u);
    EXPECT_EQ(steps[0], (RowSteps{304, 64, 64}));
    EXPECT_EQ(steps[1].c, 304);
  }
  const auto* loop = std::find_if(
      parts[0].instructions.data(), parts[0].instructions.data() + parts[0].instructions.size(),
      [](const ir::Instruction& i) { return std::holds_alternative<ir::LoopRun>(i.what); });
  for (const std::size_t slice : {0u, 2u}) {
    const ir::LoopRun::Slice& s = std::get<ir::LoopRun>(loop->what).slices[slice];
    EXPECT_EQ(s.step, 304 * 2);
    EXPECT_EQ(parts[0].buffers[static_cast<std::size_t>(s.outer)].bytes, 40 * 304 * 2);
  }
  // Not of a value that the body reads in another shape, nor of a result that is also the
  // program's.
  parts = loop_of(
      "    %r = reshape %p : bf16[301 * c]\n    %e = exp %r\n"
      "    %y = reshape %e : bf16[c, 301]\n",
      products + "  return d: %d, y: %y\n}\n");
  for (const ir::Instruction& i : parts[0].instructions) {
    if (const auto* run = std::get_if<ir::LoopRun>(&i.what)) {
      EXPECT_EQ(run->slices[0].step, 602);
      EXPECT_EQ(run->slices[2].step, 602);
    }
  }
}

// This CPU, with rows of products at multiples of 16 bytes.
class AlignedCpu final : public ir::Target {
 public:
  std::int64_t alignment() const final { return cpu_.alignment(); }
  std::int64_t row_alignment() const final { return 16; }
  std::int64_t chunk_multiple() const final { return cpu_.chunk_multiple(); }
  bool strided_gemms() const final { return cpu_.strided_gemms(); }
  bool uses_results() const final { return cpu_.uses_results(); }
  std::string refuse(const ir::Instruction& i) const final { return cpu_.refuse(i); }
  std::int64_t scratch_bytes(const ir::Gemm& g) const final { return cpu_.scratch_bytes(g); }
  std::int64_t scratch_bytes(const ir::Attention& a) const final { return cpu_.scratch_bytes(a); }
  std::int64_t scratch_bytes(const ir::ScatterAdd& s) const final { return cpu_.scratch_bytes(s); }
  std::int64_t scratch_bytes(const ir::RowGroup& g) const final { return cpu_.scratch_bytes(g); }
  std::int64_t parts_bytes(const ir::Pointwise& p) const final { return cpu_.parts_bytes(p); }
  std::int64_t most_group_columns() const final { return cpu_.most_group_columns(); }
  bool heads_add() const final { return cpu_.heads_add(); }
  bool epilogues() const final { return cpu_.epilogues(); }
  bool gelu_epilogues() const final { return cpu_.gelu_epilogues(); }
  std::optional<ir::ProductEngine> product_engine() const final { return cpu_.product_engine(); }
  ir::HeadPlan head_plan(const HeadShape& shape, const HeadFeatures& features,
                         std::int64_t workspace) const final {
    return cpu_.head_plan(shape, features, workspace);
  }
  ir::Rates rates() const final { return cpu_.rates(); }
  std::int64_t thick_rows() const final { return cpu_.thick_rows(); }

 private:
  const ir::CpuTarget cpu_{1};
};

// Runs a program of f32 on this CPU, in an arena of NaN with NaN around it.
ir::Tensors run(const ir::Graph& graph, const ir::Target& target, const ir::Tensors& inputs) {
  const ir::Program program = ir::lower(graph, target);
  constexpr std::size_t kGuard = 64;
  const auto bytes = static_cast<std::size_t>(program.arena_bytes);
  std::vector<std::vector<float>> parameters, results;
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const int id : graph.parameters()) {
    const ir::Tensor& given = inputs.at(graph.node(id).attributes->name);
    parameters.emplace_back(given.data.begin(), given.data.end());
    in.push_back(parameters.back().data());
  }
  for (const ir::Output& o : graph.outputs()) {
    results.emplace_back(static_cast<std::size_t>(ir::elements_of(graph.type(o.value))), NAN);
    out.push_back(results.back().data());
  }
  std::vector<std::byte> memory(bytes + 3 * kGuard, std::byte{0xff});
  void* begin = memory.data() + kGuard;
  std::size_t room = bytes + kGuard;
  auto* const arena = static_cast<std::byte*>(std::align(kGuard, bytes, begin, room));
  ir::CpuBackend(1).run(program, in, out, arena, {}, nullptr);
  const auto is_guard = [](std::byte b) { return b == std::byte{0xff}; };
  EXPECT_TRUE(std::all_of(memory.data(), arena, is_guard));
  EXPECT_TRUE(std::all_of(arena + bytes, memory.data() + memory.size(), is_guard));
  ir::Tensors found;
  for (std::size_t i = 0; i < results.size(); ++i) {
    found[graph.outputs()[i].name] = {ir::sizes_of(graph.type(graph.outputs()[i].value)),
                                      {results[i].begin(), results[i].end()}};
  }
  return found;
}

// A loss of 301 classes and its gradients, in the loops of several plans: gaps change no number,
// and cost the memory of the gaps.
TEST(Lowering, RunsLoopsWithRowsApart) {
  Graph graph("words");
  const Value x = graph.parameter("x", DType::f32, {90, 16}),
              w = graph.parameter("w", DType::f32, {16, 301});
  const Value logits = matmul(x, w);
  const Value loss = sum(logsumexp(logits, {1}) + sum(square(tanh(logits)), {1}), {0});
  graph.result("loss", loss);
  const std::vector<Value> gradients = graph.gradients({loss}, {x, w});
  graph.result("d_x", gradients[0]);
  graph.result("d_w", gradients[1]);
  const ir::Graph plain = ir::bind(GraphAccess::of(graph), {});
  const ir::Tensors inputs = random_inputs(plain, 3);
  int apart = 0;
  for (const std::int64_t chunks : {1, 4, 7}) {
    SCOPED_TRACE(chunks);
    CompileOptions options;
    options.head_engine = false;
    options.chunks = chunks;
    const ir::Graph chunked = ir::parse(compile(graph, options).text()).graph;
    const ir::Tensors together = run(chunked, ir::CpuTarget(1), inputs);
    EXPECT_LT(difference(together, ir::interpret(plain, inputs)), 1e-4);
    EXPECT_EQ(difference(run(chunked, AlignedCpu(), inputs), together), 0.0);
    apart += ir::lower(chunked, AlignedCpu()).arena_bytes >
             ir::lower(chunked, ir::CpuTarget(1)).arena_bytes;
  }
  EXPECT_EQ(apart, 3);
}

// Gradients of hidden states in bf16, over 50257 vocabulary entries and over 50256.
ir::Program gradient_of(std::int64_t vocab_count) {
  const std::string v = std::to_string(vocab_count);
  return ir::lower(ir::parse("graph g(%z: bf16[512, " + v + "], %w: bf16[" + v +
                             ", 768]) {\n  %t = tanh %z : bf16[512, " + v +
                             "]\n  %x = dot %t, %w contract(1; 0) : bf16[512, 768]\n"
                             "  return x: %x\n}\n")
                       .graph,
                   ir::CudaTarget(90));
}

TEST(Lowering, PlansSumsOfProductsOfOddSizes) {
  const ir::Program odd = gradient_of(50257), even = gradient_of(50256);
  const auto product_of = [](const ir::Program& p) -> const ir::Instruction& {
    return *std::find_if(p.instructions.begin(), p.instructions.end(),
                         [](const auto& i) { return std::holds_alternative<ir::Gemm>(i.what); });
  };
  const auto& gemm = std::get<ir::Gemm>(product_of(odd).what);
  EXPECT_EQ(gemm.additional_bytes, 2 * 4 * 512 * 768);
  EXPECT_EQ(std::get<ir::Gemm>(product_of(even).what).additional_bytes, 0);
  ASSERT_GE(gemm.scratch, 0);
  EXPECT_EQ(odd.buffers[static_cast<std::size_t>(gemm.scratch)].bytes,
            static_cast<std::int64_t>(cuda::gemm_workspace_bytes(ir::gemm_shape(gemm, {}))));
  // The time and the description say so.
  const ir::Rates rates = ir::CudaTarget(90).rates();
  const double more = ir::predicted_seconds(product_of(odd), rates) -
                      ir::predicted_seconds(product_of(even), rates);
  EXPECT_NEAR(more, 2 * 4 * 512 * 768 / rates.bytes, 0.1 * more);
  EXPECT_TRUE(ir::describe(product_of(odd)).ends_with(", in blocks"));
  EXPECT_FALSE(ir::describe(product_of(even)).ends_with(", in blocks"));
}

TEST(Lowering, PassesOnWhatTheTargetRefuses) {
  const ir::Graph graph =
      ir::parse("graph g(%x: f32[3, 5], %t: i64[3]) { %y = pick %x, %t axis(1) return y: %y }")
          .graph;
  try {
    ir::lower(graph, OtherTarget());
    FAIL() << "accepted";
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(), "pick: not here");
  }
}

// A GPU's rows have gaps, but a scalar has no rows.
TEST(Lowering, TakesAScalarThatBecomesARow) {
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  options.device.compute_capability = 90;
  const CompiledProgram program =
      compile(Graph::parse("graph g(%x: f32[70]) { %s = reduce_sum %x dims(0) %r = reshape %s : "
                           "f32[1] return r: %r }"),
              options);
  EXPECT_EQ(program.results().size(), 1u);
}

}  // namespace
}  // namespace logitless::test

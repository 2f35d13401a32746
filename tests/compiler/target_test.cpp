// Lowering depends on a machine only through its Target.
#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/error.h>

#include <algorithm>

#include "compiler/ir/text.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/lower.h"
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
  bool product_epilogues() const final { return false; }
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

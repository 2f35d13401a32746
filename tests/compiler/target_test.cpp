// Lowering asks a target what it must know of a machine, and nothing else.
#include <gtest/gtest.h>
#include <logitless/error.h>

#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"

namespace logitless::test {
namespace {

// A machine that is not this one.
class OtherTarget final : public ir::Target {
 public:
  std::int64_t alignment() const final { return 256; }
  std::string refuse(const ir::Instruction& instruction) const final {
    return std::holds_alternative<ir::Pick>(instruction.what) ? "pick: not here" : "";
  }
  std::int64_t scratch_bytes(const ir::Gemm& gemm) const final { return 1000 * gemm.k; }
  std::int64_t scratch_bytes(const ir::Attention&) const final { return 0; }
  std::int64_t scratch_bytes(const ir::ScatterAdd&) const final { return 0; }
  std::int64_t scratch_bytes(const ir::RowGroup&) const final { return 0; }
  bool groups_rows() const final { return false; }
  bool heads_add() const final { return false; }
  bool epilogues() const final { return false; }
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

}  // namespace
}  // namespace logitless::test

// Sums along the last dimension: any length, full blocks and less, many rows, and few rows, which
// are split into parts.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <string>

#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"
#include "compiler/run_whole.h"
#include "compiler/target/cpu.h"

namespace logitless::test {
namespace {

TEST(RowSums, OfAnyShape) {
  constexpr std::int64_t kShapes[][2] = {{4096, 12}, {2000, 40}, {100, 700}, {300, 601},
                                         {33, 513},  {40, 5000}, {3, 40000}, {5000, 9}};
  const std::pair<std::string, double> dtypes[] = {{"f64", 1e-12}, {"f32", 2e-6}, {"bf16", 0x1p-7}};
  for (const auto& [rows, columns] : kShapes) {
    for (const auto& [dtype, tolerance] : dtypes) {
      const std::string row = std::to_string(rows), column = std::to_string(columns);
      SCOPED_TRACE(dtype + "[" + row + ", " + column + "]");
      const std::string type = dtype + "[" + row + ", " + column + "]";
      const Graph graph = Graph::parse("graph g(%x: " + type + ", %y: " + type +
                                           ") {\n"
                                           "  %a = mul %x, %x\n"
                                           "  %b = sub %a, %y\n"
                                           "  %sum = reduce_sum %b dims(1)\n"
                                           "  %max = reduce_max %b dims(1)\n"
                                           "  return sum: %sum, max: %max\n}\n",
                                       "test");
      const ir::Graph& plain = GraphAccess::of(graph);
      const ir::Tensors inputs = random_inputs(plain, 6);
      const ir::Tensors one = run_whole(graph, inputs, 1);
      EXPECT_LT(difference(one, ir::interpret(plain, inputs)), tolerance);
      EXPECT_EQ(difference(run_whole(graph, inputs, 3), one), 0.0);
    }
  }
}

std::int64_t parts(const std::string& type, int dim, int threads) {
  const std::string text = "graph g(%x: " + type + ") { %y = reduce_sum %x dims(" +
                           std::to_string(dim) + ") return y: %y }";
  const ir::Program plan = ir::lower(ir::parse(text).graph, ir::CpuTarget(threads));
  return std::get<ir::Pointwise>(plan.instructions[0].what).parts;
}

TEST(RowSums, AreCutWhereThereAreFewRows) {
  for (const int threads : {1, 16}) {
    EXPECT_EQ(parts("f32[1000000]", 0, threads), 64);
    EXPECT_EQ(parts("f32[3, 1000000]", 1, threads), 22);
    EXPECT_EQ(parts("f32[63, 100000]", 1, threads), 2);
    EXPECT_EQ(parts("f32[40, 600]", 1, threads), 1);
    // A layer norm's rows, and rows few enough for one task each.
    EXPECT_EQ(parts("f32[4096, 768]", 1, threads), 1);
    EXPECT_EQ(parts("f32[64, 1000000]", 1, threads), 1);
    // Its bias: column sums, which are few tasks.
    EXPECT_EQ(parts("f32[4096, 768]", 0, threads), 64);
  }
}

}  // namespace
}  // namespace logitless::test

// Sums along the last dimension, cut into parts: of any length, whole blocks and less, many rows
// and few.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <string>

#include "compiler/graph_access.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

ir::Tensors run(const Graph& graph, const ir::Tensors& inputs, int threads) {
  CompileOptions options;
  options.threads = threads;
  options.chunk = false;
  return execute(compile(graph, options), inputs);
}

TEST(RowSums, OfPartsOfARow) {
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
      const ir::Tensors one = run(graph, inputs, 1);
      EXPECT_LT(difference(one, ir::interpret(plain, inputs)), tolerance);
      EXPECT_EQ(difference(run(graph, inputs, 3), one), 0.0);
    }
  }
}

}  // namespace
}  // namespace logitless::test

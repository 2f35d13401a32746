// Programs at sizes of 0 and 1: batches without tokens, vocabularies of one entry.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <cmath>

#include "compiler/graph_access.h"
#include "compiler/plan/views.h"
#include "compiler/programs.h"
#include "compiler/run.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

// Means of no elements are NaN on both sides.
bool same(double a, double b, double tolerance) {
  return (std::isnan(a) && std::isnan(b)) || a == b ||
         std::abs(a - b) <= tolerance * (1 + std::abs(b));
}

TEST(Sizes, OfZeroAndOneGiveTheInterpretersResults) {
  for (const NamedProgram& p : programs()) {
    for (const auto& [name, usual] : p.sizes) {
      for (const int trial : {0, 1, 2, 3}) {
        if (kAddressSanitizer && trial == 2) continue;
        // The labels of a sequence are T - 1.
        if (p.name.starts_with("shifted") && name == "T" && trial < 2) continue;
        Bindings sizes = p.sizes;
        sizes[name] = trial / 2;
        SCOPED_TRACE(p.name + " with " + name + " = " + std::to_string(trial / 2));
        const Graph graph = p.make(DType::f64);
        const ir::Graph plain = ir::bind(GraphAccess::of(graph), sizes);
        const ir::Tensors inputs = random_inputs(plain, 1);
        CompileOptions options;
        options.sizes = sizes;
        options.chunk = trial % 2 == 1;
        options.memory_budget = 1;
        options.threads = 1;
        const ir::Tensors results = execute(compile(graph, options), inputs);
        for (const auto& [output, expected] : ir::interpret(plain, inputs)) {
          const ir::Tensor& got = results.at(output);
          ASSERT_EQ(got.shape, expected.shape);
          const double tolerance = output == "accuracy" ? 1e-6 : 1e-10;  // it is f32
          for (std::size_t i = 0; i < expected.data.size(); ++i)
            ASSERT_TRUE(same(got.data[i], expected.data[i], tolerance))
                << output << "[" << i << "]: " << got.data[i] << ", not " << expected.data[i];
        }
      }
    }
  }
}

TEST(Views, OfNothingTakeAnyShapeOfNothing) {
  ir::View v;
  v.shape = {0, 3, 2};
  v.strides = ir::contiguous_strides(v.shape);
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{3, 0}, {0}, {0, 0}, {2, 1, 0, 5}}) {
    const std::optional<ir::View> to = ir::reshaped(v, shape);
    ASSERT_TRUE(to);
    EXPECT_EQ(to->shape, shape);
    EXPECT_EQ(to->strides.size(), shape.size());
  }
}

}  // namespace
}  // namespace logitless::test

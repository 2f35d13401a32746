// Products with generated epilogues on a GPU against the float64 interpreter.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include "compiler/compiled.h"
#include "compiler/epilogue_cases.h"
#include "compiler/far_programs.h"
#include "compiler/graph_access.h"
#include "compiler/product_programs.h"
#include "compiler/run.h"
#include "cuda/run_program.h"

namespace logitless::test {
namespace {

// Relative error of a result. "f" is f32 of numbers that were rounded to 16 bits.
double largest_error(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 ? 2e-5 : dtype == DType::f16 ? 6e-4 : 4e-3;
}

// The parameter is the number of a program.
class ProductEpilogues : public testing::TestWithParam<std::size_t> {};

TEST_P(ProductEpilogues, AgreeWithTheInterpreterAndRepeatTheirBits) {
  const auto device = gpu();
  if (!device) GTEST_SKIP() << "no CUDA device";
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const ProductProgram p = product_programs(dtype)[GetParam()];
    for (const ProductSizes& n : product_sizes()) {
      if (dtype == DType::f16 && n.rows != 300) continue;  // each takes seconds to compile
      SCOPED_TRACE(testing::Message() << name_of(dtype) << ' ' << n.rows);
      const Graph graph = Graph::parse(p.text);
      const CompiledProgram compiled = compile(graph, slow_memory(n, *device));
      const auto groups = groups_of_products(CompilerAccess::state(compiled).program);
      EXPECT_EQ(groups.size(), device->compute_capability >= 80 ? 1u : 0u) << compiled.explain();
      for (const ir::RowGroup* group : groups) EXPECT_EQ(pair_of(*group), p.pair);
      const ir::Graph bound =
          ir::bind(GraphAccess::of(graph), {{"N", n.rows}, {"V", n.columns}, {"D", n.depth}});
      const ir::Tensors inputs = random_inputs(bound, static_cast<std::uint64_t>(n.rows));
      const ir::Tensors wanted = ir::interpret(bound, inputs);
      const ir::Tensors once = execute_on_gpu(compiled, inputs);
      for (const ir::Output& o : bound.outputs())
        EXPECT_LT(relative_2norm(once.at(o.name), wanted.at(o.name)),
                  largest_error(o.name == "f" ? dtype : bound.type(o.value).dtype))
            << o.name;
      EXPECT_EQ(difference(execute_on_gpu(compiled, inputs, 2), once), 0.0);
    }
  }
}

// The parameter is the number of a case of the table.
class EpiloguesOfAllOperands : public testing::TestWithParam<std::size_t> {};

// Each run is in an arena that is filled with NaN and guarded.
TEST_P(EpiloguesOfAllOperands, AgreeWithTheInterpreterAndRepeatTheirBits) {
  const auto device = gpu();
  if (!device) GTEST_SKIP() << "no CUDA device";
  if (device->compute_capability < 80) GTEST_SKIP() << "no engine of products";
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const EpilogueCase c = epilogue_cases(dtype)[GetParam()];
    SCOPED_TRACE(name_of(dtype));
    const CompileOptions options = every_epilogue(*device);
    const CompiledProgram compiled = compile(Graph::parse(c.text), options);
    ASSERT_EQ(generated_epilogues(CompilerAccess::state(compiled).program), 1);
    const ir::Graph bound = ir::bind(GraphAccess::of(Graph::parse(c.text)), options.sizes);
    const ir::Tensors inputs = exact_inputs(bound, 1);
    const ir::Tensors once = execute_on_gpu(compiled, inputs);
    expect_near(c, bound, once, ir::interpret(bound, inputs));
    EXPECT_TRUE(same_bits(execute_on_gpu(compiled, inputs, 2), once));
    EXPECT_TRUE(same_bits(replay_on_gpu(compiled, inputs), once)) << "a captured graph";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, EpiloguesOfAllOperands,
                         testing::Range<std::size_t>(0, epilogue_cases(DType::bf16).size()),
                         [](const auto& number) {
                           return epilogue_cases(DType::bf16)[number.param].name;
                         });

INSTANTIATE_TEST_SUITE_P(Programs, ProductEpilogues,
                         testing::Range<std::size_t>(0, product_programs(DType::bf16).size()),
                         [](const auto& number) {
                           return product_programs(DType::bf16)[number.param].name;
                         });

}  // namespace
}  // namespace logitless::test

// Programs with GEMM epilogues on a GPU, and the same without epilogues, against the float64
// interpreter.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include "compiler/compiled.h"
#include "compiler/far_programs.h"
#include "compiler/graph_access.h"
#include "compiler/residual_block.h"
#include "compiler/run.h"
#include "cuda/run_program.h"

namespace logitless::test {
namespace {

CompileOptions for_gpu() {
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  options.device.compute_capability = 90;
  if (const auto device = gpu()) options.device = *device;
  return options;
}

int epilogues_of(const ir::Program& program) {
  int count = 0;
  for (const ir::Instruction& i : program.instructions) {
    if (const auto* gemm = std::get_if<ir::Gemm>(&i.what)) count += gemm->epilogue.any() ? 1 : 0;
    if (const auto* loop = std::get_if<ir::LoopRun>(&i.what)) count += epilogues_of(*loop->body);
  }
  return count;
}

TEST(EpiloguesOnGpu, AgreeWithTheInterpreterAndRepeatTheirBits) {
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t rows : {96, 200}) {
      const Graph graph = residual_block(rows, dtype);
      const ir::Graph plain = ir::bind(GraphAccess::of(graph), {});
      const ir::Tensors inputs = random_inputs(plain, static_cast<std::uint64_t>(rows));
      const ir::Tensors wanted = ir::interpret(plain, inputs);
      for (const int form : {0, 1, 2}) {
        SCOPED_TRACE(testing::Message() << name_of(dtype) << ' ' << rows << " form " << form);
        CompileOptions options = for_gpu();
        options.epilogues = form != 0;
        options.chunks = form == 2 ? 3 : 0;
        const CompiledProgram compiled = compile(graph, options);
        const int found = epilogues_of(CompilerAccess::state(compiled).program);
        EXPECT_EQ(found > 0, form != 0) << compiled.explain();
        const ir::Tensors once = execute_on_gpu(compiled, inputs);
        // 1.5 times the error of the CPU's program; the loss is a sum that cancels.
        for (const auto& [name, value] : wanted) {
          if (name == "loss") continue;
          EXPECT_LT(relative_2norm(once.at(name), value), dtype == DType::f16 ? 3.5e-3 : 0.025)
              << name;
        }
        EXPECT_EQ(difference(execute_on_gpu(compiled, inputs, 2), once), 0.0);
      }
    }
  }
}

// Loops after a GEMM read the same rows as those before it: gelu and its gradient. (With the bias
// in the GEMM, gelu's loops are over elements in order, and the column sum is separate.)
TEST(RowGroups, JoinAcrossAProduct) {
  CompileOptions options = for_gpu();
  options.epilogues = false;
  const CompiledProgram compiled = compile(residual_block(256, DType::bf16), options);
  std::size_t stages = 0;
  int tanhs = 0;
  const ir::Program& program = CompilerAccess::state(compiled).program;
  for (const ir::Instruction& i : program.instructions) {
    const auto* group = std::get_if<ir::RowGroup>(&i.what);
    if (group == nullptr || group->columns != 96) continue;
    stages = std::max(stages, group->stages.size());
    for (const ir::RowGroup::Stage& stage : group->stages) {
      for (const ir::Pointwise::Step& step : stage.loop.steps)
        tanhs +=
            step.kind == ir::Pointwise::Step::Kind::function && step.function == ir::Function::tanh
                ? 1
                : 0;
    }
  }
  EXPECT_GE(stages, 4u) << compiled.text();
  EXPECT_EQ(tanhs, 1);
}

}  // namespace
}  // namespace logitless::test

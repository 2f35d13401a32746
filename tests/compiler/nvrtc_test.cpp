// NVRTC compiles the generated kernels of every program. Needs no GPU; skips without NVRTC.
#include "kernels/cuda/nvrtc.h"

#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <algorithm>
#include <string>
#include <vector>

#include "compiler/compiled.h"
#include "compiler/epilogue_cases.h"
#include "compiler/exec/cuda/codegen.h"
#include "compiler/integer_loops.h"
#include "compiler/loop_grid.h"
#include "compiler/programs.h"
#include "core/check.h"
#include "kernels/device/module.h"

namespace logitless::test {
namespace {

// Returns whether a loop computes a function or a reduction that no program has.
bool in_no_program(const LoopCase& c) {
  return c.loop.reduce == ir::Reduce::product ||
         std::any_of(c.loop.steps.begin(), c.loop.steps.end(),
                     [](const auto& step) { return step.function == ir::Function::fmod; });
}

TEST(Nvrtc, CompilesAllKernelsOfAllPrograms) {
  constexpr DType kDtypes[] = {DType::f32, DType::bf16};
  std::vector<ir::GeneratedKernel> kernels;
  const auto add = [&](const LoopCase& c) {
    for (ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
      kernels.push_back(std::move(kernel));
  };
  for (const LoopCase& c : program_cases(kDtypes)) add(c);
  ASSERT_GT(kernels.size(), 100u);
  for (const LoopCase& c : integer_cases()) add(c);
  const std::size_t before = kernels.size();
  for (const auto& cases : {function_cases(), reduction_cases(false)}) {
    for (const LoopCase& c : cases)
      if (in_no_program(c)) add(c);
  }
  ASSERT_GT(kernels.size(), before + 20);
  const GroupCase group = integer_group();
  for (ir::GeneratedKernel& kernel : ir::generate(group.group, group.memory.alignments))
    kernels.push_back(std::move(kernel));
  const std::string source = ir::module_source(kernels);
  RecordProperty("kernels", static_cast<int>(kernels.size()));
  RecordProperty("bytes", static_cast<int>(source.size()));
  for (const int capability : {80, 90}) {
    try {
      EXPECT_GT(cuda::compile_cuda_fast(source, capability).size(), source.size() / 10);
    } catch (const Unsupported& missing) {
      EXPECT_NE(std::string(missing.what()).find("nvidia-cuda-nvrtc"), std::string::npos);
      GTEST_SKIP() << missing.what();
    }
  }
}

TEST(Nvrtc, CompilesRowsOfAClusterOfBlocks) {
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  options.device.compute_capability = 90;
  for (const std::int64_t columns : {16384, 50257, 262208}) {
    const CompiledProgram compiled = compile(long_rows(64, columns, DType::bf16), options);
    const ir::Program& program = CompilerAccess::state(compiled).program;
    std::vector<ir::GeneratedKernel> kernels;
    for (const ir::Instruction& i : program.instructions) {
      if (const auto* group = std::get_if<ir::RowGroup>(&i.what)) {
        for (ir::GeneratedKernel& k : ir::generate(*group, ir::buffer_alignments(program)))
          kernels.push_back(std::move(k));
      }
    }
    ASSERT_EQ(kernels.size(), 1u) << columns;
    EXPECT_EQ(kernels[0].shape.grid[0], 64u * (columns > 16384 ? 8u : 2u));
    try {
      cuda::compile_cuda_fast(ir::module_source(kernels), 90);
    } catch (const Unsupported& missing) {
      GTEST_SKIP() << missing.what();
    }
  }
}

// Returns the kernels of the generated epilogues of a program.
void add_products(const std::string& text, const CompileOptions& options,
                  std::vector<ir::GeneratedKernel>& kernels) {
  const CompiledProgram compiled = compile(Graph::parse(text), options);
  const ir::Program& program = CompilerAccess::state(compiled).program;
  const auto groups = groups_of_products(program);
  ASSERT_EQ(groups.size(), 1u) << text;
  for (ir::GeneratedKernel& k : ir::generate(*groups[0], ir::buffer_alignments(program)))
    kernels.push_back(std::move(k));
}

// Products of the programs and of all operands, those of bf16 and of f16 by turns.
TEST(Nvrtc, CompilesProductsWithEpilogues) {
  for (const int capability : {80, 90, 100, 120}) {
    DeviceLimits device;
    device.compute_capability = capability;
    std::vector<ir::GeneratedKernel> kernels;
    const DType dtypes[] = {DType::bf16, DType::f16};
    const auto turn = [&](std::size_t i) { return dtypes[(i + (capability == 90)) % 2]; };
    for (std::size_t i = 0; i < epilogue_cases(DType::bf16).size(); ++i)
      add_products(epilogue_cases(turn(i))[i].text, every_epilogue(device), kernels);
    for (std::size_t i = 0; i < product_programs(DType::bf16).size(); ++i)
      add_products(product_programs(turn(i))[i].text, slow_memory(product_sizes()[0], device),
                   kernels);
    ASSERT_GT(kernels.size(), 20u);
    try {
      cuda::compile_cuda_fast(ir::module_source(kernels), capability);
    } catch (const Unsupported& missing) {
      GTEST_SKIP() << missing.what();
    }
  }
}

TEST(Nvrtc, SaysWhatDoesNotCompile) {
  try {
    cuda::compile_cuda("extern \"C\" __global__ void f() { undeclared(); }", 90);
    FAIL();
  } catch (const Unsupported& missing) {
    GTEST_SKIP() << missing.what();
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("undeclared"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace logitless::test

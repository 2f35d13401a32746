// NVRTC compiles the generated kernels of every program. Needs no GPU; skips without NVRTC.
#include <gtest/gtest.h>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/integer_loops.h"
#include "compiler/loop_grid.h"
#include "core/check.h"
#include "kernels/device/module.h"

namespace logitless::test {
namespace {

TEST(Nvrtc, CompilesAllKernelsOfAllPrograms) {
  constexpr DType kDtypes[] = {DType::f32, DType::bf16};
  std::vector<ir::GeneratedKernel> kernels;
  for (const LoopCase& c : program_cases(kDtypes)) {
    for (ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
      kernels.push_back(std::move(kernel));
  }
  ASSERT_GT(kernels.size(), 100u);
  for (const LoopCase& c : integer_cases()) {
    for (ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
      kernels.push_back(std::move(kernel));
  }
  const GroupCase group = integer_group();
  for (ir::GeneratedKernel& kernel : ir::generate(group.group, group.memory.alignments))
    kernels.push_back(std::move(kernel));
  const std::string source = ir::module_source(kernels);
  RecordProperty("kernels", static_cast<int>(kernels.size()));
  RecordProperty("bytes", static_cast<int>(source.size()));
  for (const int capability : {80, 90}) {
    try {
      EXPECT_GT(cuda::compile_cuda(source, capability).size(), source.size() / 10);
    } catch (const Unsupported& missing) {
      EXPECT_NE(std::string(missing.what()).find("nvidia-cuda-nvrtc"), std::string::npos);
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

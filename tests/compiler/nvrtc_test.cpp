// NVRTC compiles what is generated for every program: no GPU is needed. Skips without NVRTC.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/ir/text.h"
#include "compiler/loops.h"
#include "compiler/plan/lower.h"
#include "compiler/programs.h"
#include "compiler/target/cpu.h"
#include "core/check.h"
#include "kernels/device_module.h"

namespace logitless::test {
namespace {

std::vector<ir::GeneratedKernel> kernels_of(const NamedProgram& p, DType dtype, bool chunk) {
  CompileOptions options;
  options.sizes = p.sizes;
  options.threads = 1;
  options.chunk = chunk;
  options.memory_budget = chunk ? 1 : 0;
  const CompiledProgram compiled = compile(p.make(dtype), options);
  const ir::Program program = ir::lower(ir::parse(compiled.text()).graph, ir::CpuTarget(1));
  std::vector<ir::GeneratedKernel> kernels;
  for (const LoopCase& c : cases_of(p.name, program)) {
    for (ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
      kernels.push_back(std::move(kernel));
  }
  return kernels;
}

TEST(Nvrtc, CompilesAllKernelsOfAllPrograms) {
  std::vector<ir::GeneratedKernel> kernels;
  for (const NamedProgram& p : programs()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const bool chunk : {false, true}) {
        for (ir::GeneratedKernel& kernel : kernels_of(p, dtype, chunk))
          kernels.push_back(std::move(kernel));
      }
    }
  }
  ASSERT_GT(kernels.size(), 100u);
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

// Tests training steps in less memory, in which GEMMs and attention are recomputed.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include "compiler/recompute_points.h"
#include "compiler/run.h"
#include "train/model/gpt.h"
#include "train/model/llama.h"

namespace logitless::test {
namespace {

CompileOptions plain() {
  CompileOptions options;
  options.chunk = false;
  options.threads = 1;
  return options;
}

// Returns inputs small enough that no value is infinite.
ir::Tensors inputs_of(const CompiledProgram& program) {
  ir::Tensors inputs = random_inputs(CompilerAccess::state(program).graph, 5);
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    if (t.dtype == DType::i64) continue;
    for (double& x : inputs.at(t.name).data) x *= 0.1;
  }
  return inputs;
}

train::ModelPtr llama(DType dtype) {
  train::LlamaConfig config;
  config.vocab = 60;
  config.context = 16;
  config.dim = 16;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_size = 4;
  config.inner = 24;
  config.activations = dtype;
  return train::make_llama(config);
}

TEST(RecomputedStep, OfGpt2AndLlamaHasTheSameBits) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name_of(dtype));
    const train::ModelPtr gpt = train::make_gpt(train::GptConfig{100, 24, 32, 4, 3, true, dtype});
    for (const train::ModelPtr& model : {gpt, llama(dtype)}) {
      const CompiledProgram program = compile(train::build_step(*model, 2, 16), plain());
      EXPECT_GT(expect_same_bits(program, inputs_of(program)), 3);
    }
  }
}

}  // namespace
}  // namespace logitless::test

// Tests that a training step of GPT-2 copies nothing around attention.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <string>
#include <vector>

#include "compiler/copies.h"
#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"
#include "compiler/target/cpu.h"
#include "train/model/gpt.h"

namespace logitless::test {
namespace {

TEST(Gpt2Step, HasNoPadAndNoCopyAroundAttention) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const train::GptConfig config{100, 24, 32, 4, 2, true, dtype};
    CompileOptions options;
    options.chunk = false;  // other rules would choose loops over such small values
    const CompiledProgram program =
        compile(train::build_step(*train::make_gpt(config), 3, 24), options);
    const ir::Graph graph = ir::parse(program.text()).graph;
    for (const ir::Node& n : graph.nodes()) EXPECT_NE(n.op, ir::Op::pad);
    const ir::Program plan = ir::lower(graph, ir::CpuTarget(1));
    EXPECT_TRUE(copies(plan).empty()) << copies(plan)[0];
    int attentions = 0;
    for (const ir::Instruction& i : plan.instructions) {
      const auto* a = std::get_if<ir::Attention>(&i.what);
      if (a == nullptr) continue;
      ++attentions;
      // Queries, keys and values are adjacent in rows of 96; the result has rows of 32.
      for (const ir::View* v : {&a->q, &a->k, &a->v})
        EXPECT_EQ(v->strides, (std::vector<std::int64_t>{24 * 96, 8, 96, 1}));
      EXPECT_EQ(a->out.strides, (std::vector<std::int64_t>{24 * 32, 8, 32, 1}));
      if (!a->gradient) continue;
      EXPECT_EQ(a->d_q.buffer, a->d_k.buffer);
      EXPECT_EQ(a->d_q.buffer, a->d_v.buffer);
      for (const ir::View* v : {&a->d_q, &a->d_k, &a->d_v})
        EXPECT_EQ(v->strides, (std::vector<std::int64_t>{24 * 96, 8, 96, 1}));
    }
    EXPECT_EQ(attentions, 4);  // forward and backward of two layers
  }
}

}  // namespace
}  // namespace logitless::test

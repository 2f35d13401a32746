// Tests that programs which read rounded copies of weights compute the same as those which round
// them.
#include <gtest/gtest.h>

#include <set>

#include "logitless/memory.h"
#include "train/model/gpt.h"
#include "train/model/llama.h"
#include "train/step_inputs.h"

namespace logitless::train {
namespace {

std::vector<Bytes> run(const Model& model, const Graph& graph) {
  const CompiledProgram program = compile(graph, {.chunk = false, .threads = 1});
  const std::vector<Bytes> inputs = step_inputs(model, program);
  std::vector<Bytes> outputs;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (const Bytes& input : inputs) from.push_back(input.data());
  for (const CompiledProgram::Tensor& t : program.results())
    outputs.emplace_back(static_cast<std::size_t>(t.bytes()));
  for (Bytes& output : outputs) to.push_back(output.data());
  const Buffer arena(program.arena_bytes());
  program.run(from, to, arena.data());
  return outputs;
}

std::set<std::string> read_by(const Graph& graph) {
  const std::vector<std::string> names = graph.parameter_names();
  return {names.begin(), names.end()};
}

ModelPtr gpt(bool tied, DType dtype = DType::bf16) {
  GptConfig config;
  config.vocab = 200;
  config.context = 32;
  config.dim = 32;
  config.heads = 2;
  config.layers = 2;
  config.tied_head = tied;
  config.activations = dtype;
  return make_gpt(config);
}
ModelPtr llama(bool tied) {
  LlamaConfig config;
  config.type = "llama";
  config.vocab = 200;
  config.context = 32;
  config.dim = 32;
  config.inner = 48;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_size = 8;
  config.tied_head = tied;
  config.activations = DType::bf16;
  return make_llama(config);
}

// Without loops: copies change the memory, which decides the loops, and loops change the order of
// sums.
TEST(RoundedWeightsTest, ChangeNoBit) {
  for (const ModelPtr& model : {gpt(true), gpt(false), llama(true), llama(false)}) {
    for (const ProgramPair& pair : program_pairs(*model)) {
      SCOPED_TRACE(model->type() + " " + pair.name);
      EXPECT_EQ(pair.masters.result_names(), pair.rounded.result_names());
      EXPECT_NE(read_by(pair.masters), read_by(pair.rounded));
      const std::vector<Bytes> expected = run(*model, pair.masters);
      EXPECT_NE(expected[0], Bytes(expected[0].size())) << "nothing but zeros";
      EXPECT_TRUE(run(*model, pair.rounded) == expected);
    }
  }
}

// Parameters that are not read are dropped. A token embedding that is also the head's weight is
// read as master and as copy.
TEST(RoundedWeightsTest, AreReadInsteadOfTheirMasters) {
  const auto expect = [](const ModelPtr& model, const std::string& words) {
    for (const bool step : {true, false}) {
      const std::set<std::string> names =
          read_by(step ? build_step(*model, 4, 32, Weights::rounded)
                       : build_loss(*model, 4, 32, Weights::rounded));
      for (const Parameter& p : model->parameters()) {
        const bool both = p.name == words && model->sizes().tied_head;
        EXPECT_TRUE(both || names.contains(p.name) != names.contains(rounded_name(p.name)))
            << p.name;
      }
      EXPECT_TRUE(names.contains(words));
      EXPECT_EQ(names.contains(rounded_name(words)), model->sizes().tied_head);
    }
  };
  for (const bool tied : {true, false}) {
    expect(gpt(tied), "wte.weight");
    expect(llama(tied), "model.embed_tokens.weight");
  }
}

TEST(RoundedWeightsTest, AreNoneOfFloats) {
  const ModelPtr model = gpt(true, DType::f32);
  EXPECT_EQ(build_step(*model, 4, 32).text(), build_step(*model, 4, 32, Weights::rounded).text());
}

}  // namespace
}  // namespace logitless::train

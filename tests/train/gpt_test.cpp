// Compares the graphs of GPT-2 in the float64 interpreter with plain loops and finite differences.
#include "train/model/gpt.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "compiler/graph_access.h"
#include "compiler/ir/interpreter.h"
#include "logitless/error.h"
#include "train/hash.h"
#include "train/plain_gpt.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kBatch = 2, kLength = 4;

GptConfig tiny(bool tied) {
  GptConfig config;
  config.vocab = 11;
  config.context = 6;
  config.dim = 8;
  config.heads = 2;
  config.layers = 2;
  config.tied_head = tied;
  return config;
}

// Returns parameters large enough for every part of the network to matter.
NamedNumbers random_parameters(const GptConfig& config) {
  NamedNumbers result;
  std::uint64_t stream = 0;
  for (const Parameter& p : gpt_parameters(config)) {
    Numbers& values = result[p.name];
    for (std::int64_t i = 0; i < p.numel(); ++i) {
      values.push_back(p.constant + 0.4 * normal(mix(77, stream), static_cast<std::uint64_t>(i)));
    }
    ++stream;
  }
  return result;
}

const std::vector<std::int64_t> kTokens = {3, 1, 4, 1, 5, 9, 2, 6};
const std::vector<std::int64_t> kTargets = {1, 4, 1, kIgnoredTarget, 9, 2, 10, 0};
constexpr double kInverseCount = 1.0 / 7.0;

ir::Tensor row_of(const std::vector<std::int64_t>& values, std::vector<std::int64_t> shape) {
  return {std::move(shape), Numbers(values.begin(), values.end())};
}

ir::Tensors inputs(const GptConfig& config, const NamedNumbers& parameters) {
  ir::Tensors tensors;
  for (const Parameter& p : gpt_parameters(config)) {
    tensors[p.name] = {p.shape, parameters.at(p.name)};
  }
  tensors["tokens"] = row_of(kTokens, {kBatch, kLength});
  tensors["targets"] = row_of(kTargets, {kBatch, kLength});
  tensors["inverse_count"] = {{}, {kInverseCount}};
  tensors["last"] = row_of({1, 3}, {kBatch});
  return tensors;
}

// Runs a graph with those of the tensors that it has.
ir::Tensors run(const Graph& graph, const ir::Tensors& all) {
  ir::Tensors given;
  for (const std::string& name : graph.parameter_names()) given[name] = all.at(name);
  return ir::interpret(GraphAccess::of(graph), given);
}

double plain_loss(const GptConfig& config, const NamedNumbers& parameters) {
  double total = 0.0;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const auto begin = b * kLength, end = begin + kLength;
    total += PlainGpt(config, parameters)
                 .loss({kTokens.begin() + begin, kTokens.begin() + end},
                       {kTargets.begin() + begin, kTargets.begin() + end});
  }
  return total;
}

class GptGraphTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Heads, GptGraphTest, testing::Values(true, false));

TEST_P(GptGraphTest, LossIsThatOfPlainLoops) {
  const GptConfig config = tiny(GetParam());
  const NamedNumbers parameters = random_parameters(config);
  const double expected = plain_loss(config, parameters);
  const ir::Tensors in = inputs(config, parameters);
  EXPECT_NEAR(run(build_step(*make_gpt(config), kBatch, kLength), in).at("loss").data[0],
              expected * kInverseCount, 1e-11 * expected);
  const ir::Tensors sums = run(build_loss(*make_gpt(config), kBatch, kLength), in);
  EXPECT_NEAR(sums.at("loss").data[0], expected, 1e-11 * expected);
  EXPECT_EQ(sums.at("count").data[0], 7.0);
}

TEST_P(GptGraphTest, LogitsAreThoseAfterTheLastToken) {
  const GptConfig config = tiny(GetParam());
  const NamedNumbers parameters = random_parameters(config);
  const ir::Tensor logits =
      run(build_logits(*make_gpt(config), kBatch, kLength), inputs(config, parameters))
          .at("logits");
  ASSERT_EQ(logits.shape, (std::vector<std::int64_t>{kBatch, config.vocab}));
  const PlainGpt plain(config, parameters);
  // Row 0 ends at position 1; later tokens have no effect.
  const Numbers first = plain.logits({kTokens.begin(), kTokens.begin() + 2});
  const Numbers second = plain.logits({kTokens.begin() + kLength, kTokens.end()});
  const auto vocab = static_cast<std::size_t>(config.vocab);
  for (std::size_t v = 0; v < vocab; ++v) {
    EXPECT_NEAR(logits.data[v], first[vocab + v], 1e-11);
    EXPECT_NEAR(logits.data[vocab + v], second[3 * vocab + v], 1e-11);
  }
}

TEST_P(GptGraphTest, GradientsAreThoseOfFiniteDifferences) {
  const GptConfig config = tiny(GetParam());
  const NamedNumbers parameters = random_parameters(config);
  const Graph graph = build_step(*make_gpt(config), kBatch, kLength);
  const ir::Tensors results = run(graph, inputs(config, parameters));
  const std::vector<Parameter> list = gpt_parameters(config);
  ASSERT_EQ(results.size(), list.size() + 1);
  constexpr double kStep = 1e-4;
  for (const Parameter& p : list) {
    const ir::Tensor& gradient = results.at("d_" + p.name);
    ASSERT_EQ(gradient.shape, p.shape);
    const auto count = static_cast<std::size_t>(p.numel());
    // Checks some elements of each matrix, and all of a vector.
    for (std::size_t i = 0; i<count; i += count> 24 ? 7 : 1) {
      NamedNumbers moved = parameters;
      const auto loss_at = [&](double by) {
        moved[p.name][i] = parameters.at(p.name)[i] + by;
        return plain_loss(config, moved) * kInverseCount;
      };
      const double slope =
          (8.0 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) /
          (12.0 * kStep);
      EXPECT_NEAR(gradient.data[i], slope, 1e-8 * (1.0 + std::abs(slope))) << p.name << " " << i;
    }
  }
}

TEST(GptDtypeTest, MasterWeightsGradientsAndLogitsAreF32) {
  GptConfig config = tiny(true);
  config.activations = DType::bf16;
  const NamedNumbers parameters = random_parameters(config);
  const Graph graph = build_step(*make_gpt(config), kBatch, kLength);
  const ir::Tensors results = run(graph, inputs(config, parameters));
  EXPECT_NEAR(results.at("loss").data[0], plain_loss(config, parameters) * kInverseCount, 1e-10);
  for (const ir::Output& output : GraphAccess::of(graph).outputs()) {
    EXPECT_EQ(GraphAccess::of(graph).type(output.value).dtype, DType::f32) << output.name;
  }
  const std::string text = graph.text();
  EXPECT_NE(text.find("bf16["), std::string::npos);
  EXPECT_NE(text.find("f32[8, 11]"), std::string::npos) << text;  // the logits
  EXPECT_EQ(text.find("bf16[8, 11] = dot"), std::string::npos);
}

TEST(GptNamesTest, ValuesAreCalledByTheirLayer) {
  GptConfig config = tiny(false);
  config.activations = DType::bf16;
  const std::string text = build_step(*make_gpt(config), 2, 4).text();
  for (const char* name :
       {"embedding", "layer0.ln_1", "layer1.attn", "layer1.attn.c_attn.weight", "layer0.mlp.c_fc",
        "layer1.mlp.gelu", "layer1.residual", "ln_f", "logits", "loss", "d_layer0.mlp.gelu",
        "d_layer1.attn.c_proj", "d_logits"}) {
    EXPECT_NE(text.find(std::string("\n  %") + name + " = "), std::string::npos) << name;
  }
  EXPECT_EQ(Graph::parse(text).text(), text);
}

TEST(GptSizesTest, SizesMayBeSymbols) {
  const GptConfig config = tiny(true);
  const Graph graph = build_step(*make_gpt(config), Dim::symbol("B"), Dim::symbol("T"));
  EXPECT_EQ(graph.symbols(), (std::vector<std::string>{"B", "T"}));
  const NamedNumbers parameters = random_parameters(config);
  const ir::Graph bound = ir::bind(GraphAccess::of(graph), {{"B", kBatch}, {"T", kLength}});
  ir::Tensors in = inputs(config, parameters);
  in.erase("last");
  EXPECT_NEAR(ir::interpret(bound, in).at("loss").data[0],
              plain_loss(config, parameters) * kInverseCount, 1e-10);
}

TEST(GptConfigTest, PresetsHaveTheSizesOfGpt2) {
  const auto count = [](const std::string& name) {
    std::int64_t total = 0;
    for (const Parameter& p : gpt_parameters(gpt_preset(name))) total += p.numel();
    return total;
  };
  EXPECT_EQ(count("gpt2"), 124439808);
  EXPECT_EQ(count("gpt2-medium"), 354823168);
  EXPECT_EQ(count("gpt2-large"), 774030080);
  EXPECT_EQ(count("gpt2-xl"), 1557611200);
}

void expect_message(const std::function<void()>& act, const std::string& text) {
  try {
    act();
    FAIL() << "nothing was thrown; expected: " << text;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(GptConfigTest, SaysWhatIsWrong) {
  expect_message([] { gpt_preset("gpt3"); },
                 "'gpt3' is unknown; expected gpt2, gpt2-medium, gpt2-large, gpt2-xl");
  const auto bad = [](auto change, const std::string& text) {
    GptConfig config = tiny(true);
    change(config);
    expect_message([&] { build_step(*make_gpt(config), 1, 1); }, text);
  };
  bad([](GptConfig& c) { c.vocab = 0; }, "vocab: expected a whole number from 1 to 1048576, got 0");
  bad([](GptConfig& c) { c.context = 0; },
      "context: expected a whole number from 1 to 1048576, got 0");
  bad([](GptConfig& c) { c.layers = -1; },
      "layers: expected a whole number from 1 to 4096, got -1");
  bad([](GptConfig& c) { c.heads = 3; }, "heads: expected a divisor of dim 8, got 3");
  bad([](GptConfig& c) { c.activations = DType::f16; },
      "activations: expected f32 or bf16, got f16");
  expect_message([] { build_step(*make_gpt(tiny(true)), 1, 7); },
                 "length: expected 1 to context 6, got 7");
}

TEST(GptConfigTest, StartsAsGpt2Does) {
  const GptConfig config = gpt_preset("gpt2");
  const std::vector<Parameter> list = gpt_parameters(config);
  const auto deviation = [&](const std::string& name) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].name != name) continue;
      std::vector<float> values(static_cast<std::size_t>(list[i].numel()));
      initialise(list[i], i, 1, values);
      double sum = 0.0, squares = 0.0;
      for (const float v : values) {
        sum += v;
        squares += static_cast<double>(v) * v;
      }
      EXPECT_NEAR(sum / static_cast<double>(values.size()), 0.0, 1e-4) << name;
      return std::sqrt(squares / static_cast<double>(values.size()));
    }
    ADD_FAILURE() << "no parameter " << name;
    return 0.0;
  };
  EXPECT_NEAR(deviation("h.3.attn.c_attn.weight"), 0.02, 1e-4);
  EXPECT_NEAR(deviation("h.3.mlp.c_proj.weight"), 0.02 / std::sqrt(24.0), 1e-5);
  EXPECT_NEAR(deviation("h.11.attn.c_proj.weight"), 0.02 / std::sqrt(24.0), 1e-5);
  EXPECT_EQ(deviation("h.3.mlp.c_fc.bias"), 0.0);

  std::vector<float> a(5), b(5), other(5);
  initialise(list[0], 0, 1, a);
  initialise(list[0], 0, 1, b);
  initialise(list[0], 0, 2, other);
  EXPECT_EQ(a, b);
  EXPECT_NE(a, other);
  initialise(list[2], 2, 1, a);
  EXPECT_EQ(list[2].name, "h.0.ln_1.weight");
  EXPECT_EQ(a, std::vector<float>(5, 1.0f));
}

}  // namespace
}  // namespace logitless::train

// Tests Llama and Qwen: the tables of positions, the graphs in the float64 interpreter, and
// config.json. tests/python/train compares the models with transformers.
#include "train/model/llama.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "compiler/graph_access.h"
#include "compiler/ir/interpreter.h"
#include "logitless/compiler.h"
#include "logitless/error.h"
#include "train/hash.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kBatch = 2, kLength = 4;

LlamaConfig tiny(const std::string& type, bool tied) {
  LlamaConfig config;
  config.type = type;
  config.vocab = 11;
  config.context = 16;
  config.dim = 6;
  config.inner = 10;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_size = 4;
  config.tied_head = tied;
  config.qkv_bias = type == "qwen2";
  config.theta = 20.0;  // so that all angles differ within a few positions
  config.scaling = {RopeScaling::Kind::llama3, 4.0, 1.0, 4.0, 8};
  return config;
}

// --- positions

// Compares the tables with angles in long double.
TEST(RopeTest, TablesAreRoundedOnce) {
  const std::int64_t size = 64, length = 131072;
  const double theta = 500000.0;
  const RopeTables tables = rope_tables(inverse_frequencies(size, theta, {}), length);
  ASSERT_EQ(tables.cos.size(), static_cast<std::size_t>(length * size / 2));
  for (const std::int64_t t : {0L, 1L, 2L, 1000L, 8191L, 65537L, 99999L, 131071L}) {
    for (std::int64_t i = 0; i < size / 2; ++i) {
      const long double frequency =
          std::pow(static_cast<long double>(theta), -2.0L * static_cast<long double>(i) / size);
      const long double angle = static_cast<long double>(t) * frequency;
      const auto at = static_cast<std::size_t>(t * (size / 2) + i);
      // The bound is half a unit in the last place of f32, and the angle's error in double.
      constexpr double kBound = 0x1p-25 + 1e-10;
      EXPECT_NEAR(tables.cos[at], static_cast<double>(std::cos(angle)), kBound) << t << " " << i;
      EXPECT_NEAR(tables.sin[at], static_cast<double>(std::sin(angle)), kBound) << t << " " << i;
    }
  }
}

TEST(RopeTest, StretchesFrequencies) {
  const std::int64_t size = 128;
  const std::vector<double> plain = inverse_frequencies(size, 500000.0, {});
  EXPECT_EQ(plain[0], 1.0);
  EXPECT_NEAR(plain[32], 1.0 / std::sqrt(std::sqrt(500000.0 * 500000.0)), 1e-16);
  const std::vector<double> linear =
      inverse_frequencies(size, 500000.0, {RopeScaling::Kind::linear, 4.0});
  const std::vector<double> llama3 =
      inverse_frequencies(size, 500000.0, {RopeScaling::Kind::llama3, 8.0, 1.0, 4.0, 8192});
  int kept = 0, divided = 0, between = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(linear[i], plain[i] / 4.0);
    const double wavelength = 2.0 * std::numbers::pi / plain[i];
    if (wavelength < 8192.0 / 4.0) {
      EXPECT_EQ(llama3[i], plain[i]);
      ++kept;
    } else if (wavelength > 8192.0) {
      EXPECT_EQ(llama3[i], plain[i] / 8.0);
      ++divided;
    } else {
      const double smooth = (8192.0 / wavelength - 1.0) / 3.0;
      EXPECT_NEAR(llama3[i], (1.0 - smooth) * plain[i] / 8.0 + smooth * plain[i], 1e-15);
      ++between;
    }
  }
  EXPECT_GT(kept, 20);
  EXPECT_GT(divided, 20);
  EXPECT_GT(between, 3);
}

// --- graphs

ir::Tensor row_of(const std::vector<std::int64_t>& values, std::vector<std::int64_t> shape) {
  return {std::move(shape), std::vector<double>(values.begin(), values.end())};
}

// Returns inputs large enough for every part of the network to matter.
ir::Tensors inputs(const Model& model) {
  ir::Tensors tensors;
  std::uint64_t stream = 0;
  for (const Parameter& p : model.parameters()) {
    ir::Tensor& tensor = tensors[p.name];
    tensor.shape = p.shape;
    for (std::int64_t i = 0; i < p.numel(); ++i) {
      const double noise = 0.4 * normal(mix(77, stream), static_cast<std::uint64_t>(i));
      tensor.data.push_back(static_cast<double>(static_cast<float>(p.constant + noise)));
    }
    ++stream;
  }
  for (const PositionTable& table : model.tables(kLength)) {
    tensors[table.name] = {{kLength, table.columns},
                           std::vector<double>(table.values.begin(), table.values.end())};
  }
  tensors["tokens"] = row_of({3, 1, 4, 1, 5, 9, 2, 6}, {kBatch, kLength});
  tensors["targets"] = row_of({1, 4, 1, kIgnoredTarget, 9, 2, 10, 0}, {kBatch, kLength});
  tensors["inverse_count"] = {{}, {1.0 / 7.0}};
  tensors["last"] = row_of({1, 3}, {kBatch});
  return tensors;
}

ir::Tensors run(const Graph& graph, const ir::Tensors& all) {
  ir::Tensors given;
  for (const std::string& name : graph.parameter_names()) given[name] = all.at(name);
  return ir::interpret(GraphAccess::of(graph), given);
}

struct Kind {
  std::string type;
  bool tied;
};
class LlamaGraphTest : public testing::TestWithParam<Kind> {
 protected:
  ModelPtr model() const { return make_llama(tiny(GetParam().type, GetParam().tied)); }
};
INSTANTIATE_TEST_SUITE_P(Kinds, LlamaGraphTest,
                         testing::Values(Kind{"llama", true}, Kind{"llama", false},
                                         Kind{"qwen2", true}, Kind{"qwen3", false}),
                         [](const auto& kind) {
                           return kind.param.type + (kind.param.tied ? "Tied" : "Untied");
                         });

TEST_P(LlamaGraphTest, GradientsAreThoseOfFiniteDifferences) {
  const ModelPtr m = model();
  const ir::Tensors in = inputs(*m);
  const Graph step = build_step(*m, kBatch, kLength), loss = build_loss(*m, kBatch, kLength);
  const ir::Tensors results = run(step, in);
  const std::vector<Parameter> list = m->parameters();
  ASSERT_EQ(results.size(), list.size() + 1);
  const ir::Tensors sums = run(loss, in);
  EXPECT_EQ(sums.at("count").data[0], 7.0);
  EXPECT_NEAR(results.at("loss").data[0], sums.at("loss").data[0] / 7.0, 1e-12);
  constexpr double kStep = 1e-4;
  for (const Parameter& p : list) {
    const ir::Tensor& gradient = results.at("d_" + p.name);
    ASSERT_EQ(gradient.shape, p.shape);
    const auto count = static_cast<std::size_t>(p.numel());
    double largest = 0.0;
    for (std::size_t i = 0; i<count; i += count> 16 ? 11 : 1) {
      const auto loss_at = [&](double by) {
        ir::Tensors moved = in;
        moved.at(p.name).data[i] += by;
        return run(loss, moved).at("loss").data[0] / 7.0;
      };
      const double slope =
          (8.0 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) /
          (12.0 * kStep);
      EXPECT_NEAR(gradient.data[i], slope, 1e-8 * (1.0 + std::abs(slope))) << p.name << " " << i;
      largest = std::max(largest, std::abs(slope));
    }
    EXPECT_GT(largest, 1e-6) << p.name;
  }
}

TEST_P(LlamaGraphTest, LogitsAreThoseAfterTheLastToken) {
  const ModelPtr m = model();
  ir::Tensors in = inputs(*m);
  // Each row has one target, at the position of its last token.
  const std::int64_t none = kIgnoredTarget;
  in["targets"] = row_of({none, 7, none, none, none, none, none, 2}, {kBatch, kLength});
  const double total = run(build_loss(*m, kBatch, kLength), in).at("loss").data[0];
  const ir::Tensor logits = run(build_logits(*m, kBatch, kLength), in).at("logits");
  ASSERT_EQ(logits.shape, (std::vector<std::int64_t>{kBatch, 11}));
  double expected = 0.0;
  for (const std::size_t row : {0u, 1u}) {
    double sum = 0.0;
    for (std::size_t v = 0; v < 11; ++v) sum += std::exp(logits.data[row * 11 + v]);
    expected += std::log(sum) - logits.data[row * 11 + (row == 0 ? 7 : 2)];
  }
  EXPECT_NEAR(total, expected, 1e-11);
}

TEST_P(LlamaGraphTest, PositionsMatterByTheirDistance) {
  const ModelPtr m = model();
  ir::Tensors in = inputs(*m);
  const double loss = run(build_loss(*m, kBatch, kLength), in).at("loss").data[0];
  // Adding one angle to all positions changes nothing; adding a different one to each does.
  for (const double by : {0.7, 0.0}) {
    ir::Tensors moved = in;
    std::vector<double>&cos = moved.at("rope.cos").data, &sin = moved.at("rope.sin").data;
    for (std::size_t i = 0; i < cos.size(); ++i) {
      const double angle =
          std::atan2(sin[i], cos[i]) + (by > 0.0 ? by : 0.1 * static_cast<double>(i));
      cos[i] = std::cos(angle);
      sin[i] = std::sin(angle);
    }
    const double other = run(build_loss(*m, kBatch, kLength), moved).at("loss").data[0];
    if (by > 0.0) {
      EXPECT_NEAR(other, loss, 1e-6);  // the tables are rounded to f32
    } else {
      EXPECT_GT(std::abs(other - loss), 1e-3);
    }
  }
}

TEST(LlamaSizesTest, SizesMayBeSymbols) {
  const ModelPtr m = make_llama(tiny("llama", true));
  const Graph graph = build_step(*m, Dim::symbol("B"), Dim::symbol("T"));
  EXPECT_EQ(graph.symbols(), (std::vector<std::string>{"B", "T"}));
  const ir::Graph bound = ir::bind(GraphAccess::of(graph), {{"B", kBatch}, {"T", kLength}});
  ir::Tensors in = inputs(*m);
  in.erase("last");
  EXPECT_EQ(ir::interpret(bound, in).at("loss").data[0],
            run(build_step(*m, kBatch, kLength), in).at("loss").data[0]);
}

// --- configurations

TEST(LlamaConfigTest, PresetsHaveTheSizesOfTheirNames) {
  const auto count = [](const std::string& name) {
    std::int64_t total = 0;
    for (const Parameter& p : make_llama(llama_preset(name))->parameters()) total += p.numel();
    return total;
  };
  // The numbers of parameters that transformers counts for the released configurations.
  EXPECT_EQ(count("llama-2-7b"), 6738415616);
  EXPECT_EQ(count("llama-3.1-8b"), 8030261248);
  EXPECT_EQ(count("llama-3.2-1b"), 1235814400);
  EXPECT_EQ(count("llama-3.2-3b"), 3212749824);
  EXPECT_EQ(count("qwen2.5-0.5b"), 494032768);
  EXPECT_EQ(count("qwen3-0.6b"), 596049920);
}

TEST(LlamaConfigTest, AreWhatTheyWrite) {
  for (const std::string& name : llama_preset_names()) {
    SCOPED_TRACE(name);
    LlamaConfig config = llama_preset(name);
    EXPECT_EQ(parse_llama_config(llama_config_json(config)), config);
    config.activations = DType::bf16;
    const ModelPtr model = make_llama(config);
    const ModelPtr read = parse_model(model->config_text());
    EXPECT_EQ(read->config_text(), model->config_text());
    EXPECT_EQ(read->sizes().activations, DType::bf16);
  }
  for (const std::string type : {"llama", "qwen2", "qwen3"}) {
    LlamaConfig config = tiny(type, false);
    config.bos_token_id = "[1, 2]";
    config.bos_token_id = Json::parse(config.bos_token_id).dump();
    EXPECT_EQ(parse_llama_config(llama_config_json(config)), config) << type;
  }
}

TEST(LlamaConfigTest, OfACheckpointAreHeldToTheSame) {
  const auto refused = [](const char* field, const Json& value) {
    Json json = Json::parse(make_llama(tiny("qwen3", true))->config_text());
    json[field] = value;
    EXPECT_THROW(parse_model(json.dump()), std::exception) << field << " " << value;
  };
  refused("hidden_size", 0);
  refused("hidden_size", "8");
  refused("head_dim", 3);
  refused("activations", "f16");
  refused("activations", nullptr);
  refused("model_type", "gpt2");
  refused("rope_scaling", {{"rope_type", "yarn"}});
}

Json file() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"vocab_size", 11},
          {"max_position_embeddings", 16},
          {"hidden_size", 12},
          {"intermediate_size", 10},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 2},
          {"rms_norm_eps", 1e-6},
          {"hidden_act", "silu"},
          {"rope_scaling", nullptr}};
}

TEST(LlamaConfigTest, HasTransformersDefaults) {
  Json json = file();
  LlamaConfig config = parse_llama_config(json);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_size, 6);
  EXPECT_EQ(config.theta, 10000.0);
  EXPECT_FALSE(config.tied_head);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_EQ(config.eos_token_id, "null");
  json["architectures"] = {"Qwen3ForCausalLM"};
  json["model_type"] = "qwen3";
  EXPECT_EQ(parse_llama_config(json).head_size, 128);
  json["architectures"] = {"Qwen2ForCausalLM"};
  json["model_type"] = "qwen2";
  // A sliding window that is configured and not used.
  json["sliding_window"] = 4096;
  json["use_sliding_window"] = false;
  config = parse_llama_config(json);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.out_bias);
  // The position fields of transformers 4 and 5.
  const Json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8}};
  json["rope_theta"] = 50.0;
  json["rope_scaling"] = scaling;
  const LlamaConfig older = parse_llama_config(json);
  EXPECT_EQ(older.theta, 50.0);
  EXPECT_EQ(older.scaling, (RopeScaling{RopeScaling::Kind::llama3, 8.0, 1.0, 4.0, 8}));
  json.erase("rope_theta");
  json.erase("rope_scaling");
  json["rope_parameters"] = scaling;
  json["rope_parameters"]["rope_theta"] = 50.0;
  EXPECT_EQ(parse_llama_config(json), older);
}

TEST(LlamaConfigTest, RefusesByName) {
  const auto refused = [](const std::string& field, const Json& value, const std::string& text) {
    Json json = file();
    json[field] = value;
    try {
      parse_llama_config(json);
      ADD_FAILURE() << "nothing was thrown; expected: " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.what(), text);
    }
  };
  refused("model_type", "mistral",
          "model_type: expected \"llama\", \"qwen2\" or \"qwen3\", found \"mistral\"");
  refused("architectures", {"LlamaForSequenceClassification"},
          "architectures: expected [\"LlamaForCausalLM\"], found "
          "[\"LlamaForSequenceClassification\"]");
  refused("hidden_act", "gelu", "hidden_act: expected \"silu\", found \"gelu\"");
  refused("mlp_bias", true, "mlp_bias: expected false, found true");
  refused("attention_dropout", 0.1, "attention_dropout: expected 0.0, found 0.1");
  refused("use_sliding_window", true, "use_sliding_window: expected false, found true");
  refused("sliding_window", 4096, "sliding_window: expected none, found 4096");
  refused("layer_types", {"full_attention", "sliding_attention"},
          "layer_types: expected \"full_attention\" of every layer, found "
          "[\"full_attention\",\"sliding_attention\"]");
  refused("partial_rotary_factor", 0.5, "partial_rotary_factor: expected 1.0, found 0.5");
  refused("quantization_config", {{"bits", 4}},
          "quantization_config: expected none, found {\"bits\":4}");
  refused("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}},
          "rope_scaling.rope_type: expected \"default\", \"linear\" or \"llama3\", found \"yarn\"");
  refused("rope_scaling", {{"type", "dynamic"}, {"factor", 4.0}},
          "rope_scaling.type: expected \"default\", \"linear\" or \"llama3\", found \"dynamic\"");
  refused("rope_scaling", {{"rope_type", "linear"}},
          "rope_scaling.factor: expected a number over 0, found none");
  refused("rope_scaling", 4, "rope_scaling: expected an object, found 4");
  refused("rope_parameters", {{"full_attention", {{"rope_type", "default"}}}},
          "rope_parameters.rope_type: expected \"default\", \"linear\" or \"llama3\", found none");
  refused("hidden_size", nullptr,
          "hidden_size: expected a whole number from 1 to 1048576, found none");
  refused("num_hidden_layers", 2.5,
          "num_hidden_layers: expected a whole number from 1 to 4096, found 2.5");
  refused("rms_norm_eps", 0.0, "rms_norm_eps: expected a number over 0, found 0.0");
  refused("num_key_value_heads", 3,
          "num_key_value_heads: expected a divisor of num_attention_heads 2, found 3");
  refused("head_dim", 5, "head_dim: expected an even number, found 5");
  refused("hidden_size", 13,
          "head_dim: expected a number, as hidden_size 13 is no multiple of num_attention_heads 2, "
          "found none");
  refused("tie_word_embeddings", 1, "tie_word_embeddings: expected true or false, found 1");
}

}  // namespace
}  // namespace logitless::train

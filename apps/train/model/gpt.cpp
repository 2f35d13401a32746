#include "train/model/gpt.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "json/json.h"
#include "logitless/error.h"
#include "train/json_number.h"
#include "train/run/bounds.h"

namespace logitless::train {
namespace {

struct Preset {
  std::string_view name;
  std::int64_t dim, heads, layers;
};
constexpr Preset kPresets[] = {
    {"gpt2", 768, 12, 12},
    {"gpt2-medium", 1024, 16, 24},
    {"gpt2-large", 1280, 20, 36},
    {"gpt2-xl", 1600, 25, 48},
};

constexpr int kEndOfText = 50256;  // the end-of-text token of llm.c's files

class Gpt : public Model {
 public:
  explicit Gpt(const GptConfig& config) : config_(config) { check_config(config); }

  std::string type() const override { return "gpt2"; }
  ModelSizes sizes() const override {
    return {config_.vocab,  config_.context,   config_.dim,        config_.heads,
            config_.layers, config_.tied_head, config_.activations};
  }
  std::vector<Parameter> parameters() const override { return gpt_parameters(config_); }
  std::vector<PositionTable> tables(std::int64_t) const override { return {}; }
  std::string head() const override { return config_.tied_head ? "wte.weight" : kHeadWeight; }

  Value hidden(Network& net) const override {
    Value x = embedded(net);
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      const Scope scope = net.scope(fmt::format("layer{}", layer));
      const std::string h = fmt::format("h.{}.", layer);
      x = net.residual(x, attend(net, norm(net, x, h, "ln_1"), h + "attn."));
      x = net.residual(x, mlp(net, norm(net, x, h, "ln_2"), h + "mlp."));
    }
    return norm(net, x, "", "ln_f");
  }

  std::string config_text() const override {
    return Json{{"vocab", config_.vocab},
                {"context", config_.context},
                {"dim", config_.dim},
                {"heads", config_.heads},
                {"layers", config_.layers},
                {"tied_head", config_.tied_head},
                {"activations", name_of(config_.activations)}}
        .dump();
  }

  FileNames file_names() const override {
    FileNames names{"transformer.", false, "wte.weight", {}};
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      for (const char* mask : {"bias", "masked_bias"})
        names.ignored.push_back(fmt::format("h.{}.attn.{}", layer, mask));
    }
    return names;
  }

  Json config_json(int end_of_text) const override {
    Json json = {{"architectures", {"GPT2LMHeadModel"}},
                 {"model_type", "gpt2"},
                 {"vocab_size", config_.vocab},
                 {"n_positions", config_.context},
                 {"n_embd", config_.dim},
                 {"n_head", config_.heads},
                 {"n_layer", config_.layers},
                 {"activation_function", "gelu_new"},
                 {"layer_norm_epsilon", 1e-5},
                 {"tie_word_embeddings", config_.tied_head}};
    // Texts start with the end-of-text token of the text before, as in GPT-2.
    const int end = end_of_text >= 0 ? end_of_text : kEndOfText;
    if (end < config_.vocab) json["bos_token_id"] = json["eos_token_id"] = end;
    return json;
  }

 private:
  Value embedded(Network& net) const {
    const Scope scope = net.scope("embedding");
    const Value embeddings = take(net.master("wte.weight"), net.tokens());
    const Value places = slice(net.master("wpe.weight"), 0, 0, net.length());
    return cast(reshape(embeddings + places, {net.rows(), config_.dim}), config_.activations);
  }

  // Returns x W + b. Parameters are named `prefix` + `name`, values `name`, in the current scope.
  static Value linear(Network& net, Value x, const std::string& prefix, const std::string& name) {
    const Scope scope = net.scope(name);
    return matmul(x, net.weight(prefix + name + ".weight")) + net.weight(prefix + name + ".bias");
  }

  Value norm(Network& net, Value x, const std::string& prefix, const std::string& name) const {
    const Scope scope = net.scope(name);
    const Value y = layer_norm(cast(x, DType::f32), net.master(prefix + name + ".weight"),
                               net.master(prefix + name + ".bias"));
    return cast(y, config_.activations);
  }

  static Value mlp(Network& net, Value x, const std::string& prefix) {
    const Scope scope = net.scope("mlp");
    const Value inner = linear(net, x, prefix, "c_fc");
    const auto activated = [&] {
      const Scope name = net.scope("gelu");
      return gelu(inner);
    };
    return linear(net, activated(), prefix, "c_proj");
  }

  // Attention. Heads are adjacent columns of queries, keys and values: [N, D] <-> [B, H, T, D / H].
  Value attend(Network& net, Value x, const std::string& prefix) const {
    const Scope scope = net.scope("attn");
    const Value qkv = linear(net, x, prefix, "c_attn");
    const std::int64_t dim = config_.dim, size = dim / config_.heads;
    const auto part = [&](std::int64_t index) {
      const Value columns = slice(qkv, 1, index * dim, (index + 1) * dim);
      return transpose(reshape(columns, {net.batch(), net.length(), config_.heads, size}),
                       {0, 2, 1, 3});
    };
    const double scale = 1.0 / std::sqrt(static_cast<double>(size));
    const Value y = attention(part(0), part(1), part(2), scale, /*causal=*/true);
    return linear(net, reshape(transpose(y, {0, 2, 1, 3}), {net.rows(), dim}), prefix, "c_proj");
  }

  GptConfig config_;
};

}  // namespace

std::vector<std::string> gpt_preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

GptConfig gpt_preset(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.name != name) continue;
    GptConfig config;
    config.dim = preset.dim;
    config.heads = preset.heads;
    config.layers = preset.layers;
    return config;
  }
  throw InvalidArgument(
      fmt::format("'{}' is unknown; expected {}", name, fmt::join(gpt_preset_names(), ", ")));
}

void check_config(const GptConfig& config) {
  const auto check = [](std::string_view name, std::int64_t value) {
    const WholeBounds& bounds = whole_bounds(name);
    if (!bounds.allow(value))
      throw InvalidArgument(fmt::format("{}: {}, got {}", name, bounds.expected(), value));
  };
  check("vocab", config.vocab);
  check("context", config.context);
  check("dim", config.dim);
  check("heads", config.heads);
  check("layers", config.layers);
  if (config.dim % config.heads != 0) {
    throw InvalidArgument(
        fmt::format("heads: expected a divisor of dim {}, got {}", config.dim, config.heads));
  }
  if (config.activations != DType::f32 && config.activations != DType::bf16) {
    throw InvalidArgument(
        fmt::format("activations: expected f32 or bf16, got {}", name_of(config.activations)));
  }
}

std::vector<Parameter> gpt_parameters(const GptConfig& config) {
  check_config(config);
  constexpr double kDeviation = 0.02;
  // Initial weights of residual branches shrink with the number of layers. The variance of the
  // residual stream at the end therefore does not depend on it.
  const double residual = kDeviation / std::sqrt(2.0 * static_cast<double>(config.layers));
  const std::int64_t dim = config.dim;
  std::vector<Parameter> list = {
      {"wte.weight", {config.vocab, dim}, 0.0, kDeviation},
      {"wpe.weight", {config.context, dim}, 0.0, kDeviation},
  };
  const auto norm = [&](const std::string& name) {
    list.push_back({name + ".weight", {dim}, 1.0, 0.0});
    list.push_back({name + ".bias", {dim}, 0.0, 0.0});
  };
  const auto linear = [&](const std::string& name, std::int64_t in, std::int64_t out,
                          double deviation) {
    list.push_back({name + ".weight", {in, out}, 0.0, deviation});
    list.push_back({name + ".bias", {out}, 0.0, 0.0});
  };
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string h = fmt::format("h.{}.", layer);
    norm(h + "ln_1");
    linear(h + "attn.c_attn", dim, 3 * dim, kDeviation);
    linear(h + "attn.c_proj", dim, dim, residual);
    norm(h + "ln_2");
    linear(h + "mlp.c_fc", dim, 4 * dim, kDeviation);
    linear(h + "mlp.c_proj", 4 * dim, dim, residual);
  }
  norm("ln_f");
  if (!config.tied_head) list.push_back({"lm_head.weight", {config.vocab, dim}, 0.0, kDeviation});
  return list;
}

ModelPtr make_gpt(const GptConfig& config) { return std::make_shared<Gpt>(config); }

ModelPtr parse_gpt(const Json& json) {
  GptConfig config;
  config.vocab = whole_number(json.at("vocab"));
  config.context = whole_number(json.at("context"));
  config.dim = whole_number(json.at("dim"));
  config.heads = whole_number(json.at("heads"));
  config.layers = whole_number(json.at("layers"));
  config.tied_head = json.at("tied_head").get<bool>();
  config.activations = parse_dtype(json.at("activations").get<std::string>());
  return make_gpt(config);
}

}  // namespace logitless::train

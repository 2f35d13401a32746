#include "train/gpt.h"

#include <fmt/format.h>

#include <cmath>
#include <map>

#include "logitless/error.h"
#include "train/bounds.h"
#include "train/hash.h"

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

Shape shape_of(const std::vector<std::int64_t>& sizes) { return Shape(sizes.begin(), sizes.end()); }

// Writes the network into a graph. Activations are [N, D] with N = batch * length, in the config's
// dtype.
class Network {
 public:
  Network(Graph& graph, const GptConfig& config, const Dim& batch, const Dim& length)
      : graph_(graph), config_(config), batch_(batch), length_(length) {
    for (const GptParameter& p : gpt_parameters(config)) {
      parameters_.push_back(graph.parameter(p.name, DType::f32, shape_of(p.shape)));
      by_name_[p.name] = parameters_.back();
      names_.push_back(p.name);
    }
    if (length.is_constant() && (length.value() < 1 || length.value() > config.context)) {
      throw InvalidArgument(
          fmt::format("length: expected 1 to context {}, got {}", config.context, length.value()));
    }
    tokens_ = graph.parameter("tokens", DType::i64, {batch, length});
  }

  // After the last layer norm.
  Value hidden() {
    const Dim rows = batch_ * length_;
    const Value words = take(master("wte.weight"), tokens_);
    const Value places = slice(master("wpe.weight"), 0, 0, length_);
    Value x = cast(reshape(words + places, {rows, config_.dim}), config_.activations);
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      const std::string h = fmt::format("h.{}.", layer);
      x = x + attend(norm(x, h + "ln_1"), h + "attn.");
      x = x + linear(gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc")), h + "mlp.c_proj");
    }
    return norm(x, "ln_f");
  }

  // f32 [rows, V] of hidden [rows, D].
  Value logits(Value x) {
    const Value table = weight(config_.tied_head ? "wte.weight" : "lm_head.weight");
    return dot(x, table, {.contract_a = {1}, .contract_b = {1}, .f32_result = true});
  }

  // The loss of each target [N], 0 where it is ignored, and which are counted: 1 or 0.
  struct Losses {
    Value loss, counted;
  };
  Losses losses() {
    const Value targets =
        reshape(graph_.parameter("targets", DType::i64, {batch_, length_}), {batch_ * length_});
    const Value z = logits(hidden());
    const Value loss = logsumexp(z, {1}) - pick(z, targets, 1);
    const Value ignored =
        equal(targets, graph_.constant(static_cast<double>(kIgnoredTarget), DType::i64));
    return {select(ignored, graph_.constant(0.0), loss),
            select(ignored, graph_.constant(0.0), graph_.constant(1.0))};
  }

  void add_gradients(Value loss) {
    const std::vector<Value> gradients = graph_.gradients({loss}, parameters_);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      graph_.result("d_" + names_[i], gradients[i]);
    }
  }

 private:
  Value master(const std::string& name) const { return by_name_.at(name); }
  Value weight(const std::string& name) const { return cast(master(name), config_.activations); }

  Value linear(Value x, const std::string& name) {
    return matmul(x, weight(name + ".weight")) + weight(name + ".bias");
  }

  Value norm(Value x, const std::string& name) {
    const Value y =
        layer_norm(cast(x, DType::f32), master(name + ".weight"), master(name + ".bias"));
    return cast(y, config_.activations);
  }

  // Heads lie side by side in the columns of queries, keys and values: [N, D] <-> [B, H, T, D / H].
  Value attend(Value x, const std::string& name) {
    const Value qkv = linear(x, name + "c_attn");
    const std::int64_t dim = config_.dim, size = dim / config_.heads;
    const auto part = [&](std::int64_t index) {
      const Value columns = slice(qkv, 1, index * dim, (index + 1) * dim);
      return transpose(reshape(columns, {batch_, length_, config_.heads, size}), {0, 2, 1, 3});
    };
    const double scale = 1.0 / std::sqrt(static_cast<double>(size));
    const Value y = attention(part(0), part(1), part(2), scale, /*causal=*/true);
    return linear(reshape(transpose(y, {0, 2, 1, 3}), {batch_ * length_, dim}), name + "c_proj");
  }

  Graph& graph_;
  const GptConfig& config_;
  Dim batch_, length_;
  std::vector<std::string> names_;
  std::vector<Value> parameters_;
  std::map<std::string, Value> by_name_;
  Value tokens_;
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

std::int64_t GptParameter::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::vector<GptParameter> gpt_parameters(const GptConfig& config) {
  check_config(config);
  constexpr double kDeviation = 0.02;
  // What each layer adds to the residual stream shrinks with their number, so that its variance at
  // the end does not depend on it.
  const double residual = kDeviation / std::sqrt(2.0 * static_cast<double>(config.layers));
  const std::int64_t dim = config.dim;
  std::vector<GptParameter> list = {
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

void initialise(const GptParameter& parameter, std::size_t index, std::uint64_t seed,
                std::span<float> values) {
  const std::uint64_t stream = mix(mix(seed, 0x696e6974), index);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double noise = parameter.deviation == 0.0 ? 0.0 : parameter.deviation * normal(stream, i);
    values[i] = static_cast<float>(parameter.constant + noise);
  }
}

Graph build_gpt(const GptConfig& config, const Dim& batch, const Dim& length) {
  Graph graph("gpt");
  Network network(graph, config, batch, length);
  const Value inverse_count = graph.parameter("inverse_count", DType::f32, {});
  const Value loss = sum(network.losses().loss, {0}) * inverse_count;
  graph.result("loss", loss);
  network.add_gradients(loss);
  return graph;
}

Graph build_gpt_loss(const GptConfig& config, const Dim& batch, const Dim& length) {
  Graph graph("gpt_loss");
  const Network::Losses losses = Network(graph, config, batch, length).losses();
  graph.result("loss", sum(losses.loss, {0}));
  graph.result("count", sum(losses.counted, {0}));
  return graph;
}

Graph build_gpt_logits(const GptConfig& config, const Dim& batch, const Dim& length) {
  if (!length.is_constant()) {
    throw InvalidArgument(fmt::format("length: expected a number, got {}", length.text()));
  }
  Graph graph("gpt_logits");
  Network network(graph, config, batch, length);
  const Value last = graph.parameter("last", DType::i64, {batch});
  const Value rows = graph.iota({batch}, 0) * static_cast<double>(length.value()) + last;
  graph.result("logits", network.logits(take(network.hidden(), rows)));
  return graph;
}

}  // namespace logitless::train

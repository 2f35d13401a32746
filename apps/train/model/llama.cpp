#include "train/model/llama.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "json/json.h"
#include "logitless/error.h"

namespace logitless::train {
namespace {

constexpr const char* kPrefix = "model.";
constexpr const char* kEmbedding = "embed_tokens.weight";
constexpr const char* kCos = "rope.cos";
constexpr const char* kSin = "rope.sin";

std::string layer_name(std::int64_t layer) { return fmt::format("{}layers.{}.", kPrefix, layer); }

class Llama : public Model {
 public:
  explicit Llama(const LlamaConfig& config) : config_(config) {
    if (config.activations != DType::f32 && config.activations != DType::bf16) {
      throw InvalidArgument(
          fmt::format("activations: expected f32 or bf16, got {}", name_of(config.activations)));
    }
  }

  std::string type() const override { return config_.type; }
  ModelSizes sizes() const override {
    return {config_.vocab,  config_.context,   config_.dim,        config_.heads,
            config_.layers, config_.tied_head, config_.activations};
  }

  std::vector<Parameter> parameters() const override {
    std::vector<Parameter> list;
    const auto matrix = [&](const std::string& name, std::int64_t out, std::int64_t in) {
      list.push_back({name + ".weight", {out, in}, 0.0, config_.deviation});
    };
    const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in, bool bias) {
      matrix(name, out, in);
      if (bias) list.push_back({name + ".bias", {out}, 0.0, 0.0});
    };
    const auto norm = [&](const std::string& name, std::int64_t size) {
      list.push_back({name + ".weight", {size}, 1.0, 0.0});
    };
    const std::int64_t dim = config_.dim, size = config_.head_size;
    const std::int64_t q = config_.heads * size, kv = config_.kv_heads * size;
    list.push_back(
        {std::string(kPrefix) + kEmbedding, {config_.vocab, dim}, 0.0, config_.deviation});
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      const std::string h = layer_name(layer);
      norm(h + "input_layernorm", dim);
      linear(h + "self_attn.q_proj", q, dim, config_.qkv_bias);
      linear(h + "self_attn.k_proj", kv, dim, config_.qkv_bias);
      linear(h + "self_attn.v_proj", kv, dim, config_.qkv_bias);
      linear(h + "self_attn.o_proj", dim, q, config_.out_bias);
      if (config_.has_qk_norm()) {
        norm(h + "self_attn.q_norm", size);
        norm(h + "self_attn.k_norm", size);
      }
      norm(h + "post_attention_layernorm", dim);
      matrix(h + "mlp.gate_proj", config_.inner, dim);
      matrix(h + "mlp.up_proj", config_.inner, dim);
      matrix(h + "mlp.down_proj", dim, config_.inner);
    }
    norm(std::string(kPrefix) + "norm", dim);
    if (!config_.tied_head)
      list.push_back({kHeadWeight, {config_.vocab, dim}, 0.0, config_.deviation});
    return list;
  }

  std::vector<PositionTable> tables(std::int64_t length) const override {
    RopeTables rope =
        rope_tables(inverse_frequencies(config_.head_size, config_.theta, config_.scaling), length);
    const std::int64_t columns = config_.head_size / 2;
    return {{kCos, columns, std::move(rope.cos)}, {kSin, columns, std::move(rope.sin)}};
  }

  Value hidden(Network& net) const override {
    Value x = embedded(net);
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      const Scope scope = net.scope(fmt::format("layer{}", layer));
      const std::string h = layer_name(layer);
      x = net.residual(x, attend(net, norm(net, x, h, "input_layernorm"), h + "self_attn."));
      x = net.residual(x, mlp(net, norm(net, x, h, "post_attention_layernorm"), h + "mlp."));
    }
    return norm(net, x, kPrefix, "norm");
  }

  std::string head() const override {
    return config_.tied_head ? std::string(kPrefix) + kEmbedding : kHeadWeight;
  }

  std::string config_text() const override {
    Json json = llama_config_json(config_);
    json["activations"] = name_of(config_.activations);
    return json.dump();
  }

  FileNames file_names() const override {
    FileNames names{kPrefix, true, kEmbedding, {}};
    for (std::int64_t layer = 0; layer < config_.layers; ++layer)
      names.ignored.push_back(fmt::format("layers.{}.self_attn.rotary_emb.inv_freq", layer));
    return names;
  }

  Json config_json(int end_of_text) const override {
    Json json = llama_config_json(config_);
    if (end_of_text >= 0) json["bos_token_id"] = json["eos_token_id"] = end_of_text;
    return json;
  }

 private:
  Value embedded(Network& net) const {
    const Scope scope = net.scope("embedding");
    const Value embeddings = take(net.master(std::string(kPrefix) + kEmbedding), net.tokens());
    return cast(reshape(embeddings, {net.rows(), config_.dim}), config_.activations);
  }

  // Maps x [N, in] -> [N, out]. Parameters are named `prefix` + `name`, values `name`, in the
  // current scope.
  static Value linear(Network& net, Value x, const std::string& prefix, const std::string& name,
                      bool bias = false) {
    const Scope scope = net.scope(name);
    const Value weight = net.weight(prefix + name + ".weight");
    const Value y = dot(x, weight, {.contract_a = {1}, .contract_b = {1}});
    return bias ? y + net.weight(prefix + name + ".bias") : y;
  }

  // Returns the RMS norm over the last dimension, in f32.
  Value scaled(Network& net, Value x, const std::string& name) const {
    return rms_norm(cast(x, DType::f32), net.master(name + ".weight"), config_.epsilon);
  }
  Value norm(Network& net, Value x, const std::string& prefix, const std::string& name) const {
    const Scope scope = net.scope(name);
    return cast(scaled(net, x, prefix + name), config_.activations);
  }

  static Value gated(Network& net, Value gate, Value up) {
    const Scope scope = net.scope("silu");
    return silu(gate) * up;
  }
  static Value mlp(Network& net, Value x, const std::string& prefix) {
    const Scope scope = net.scope("mlp");
    const Value gate = linear(net, x, prefix, "gate_proj"), up = linear(net, x, prefix, "up_proj");
    return linear(net, gated(net, gate, up), prefix, "down_proj");
  }

  // Projects x to heads, which are adjacent columns of the result: [N, H S] -> [B, T, H, S].
  Value heads_of(Network& net, Value x, const std::string& prefix, const std::string& name,
                 std::int64_t heads) const {
    const Value y = linear(net, x, prefix, name + "_proj", config_.qkv_bias);
    return reshape(y, {net.batch(), net.length(), heads, config_.head_size});
  }
  // Returns queries or keys with rotary embedding. They are rotated before the heads are transposed
  // in front of the positions, so that neither this nor its gradient copies.
  Value turned(Network& net, Value x, const std::string& prefix, const std::string& name,
               std::int64_t heads) const {
    Value y = heads_of(net, x, prefix, name, heads);
    const Scope scope = net.scope(name);
    if (config_.has_qk_norm()) y = scaled(net, y, prefix + name + "_norm");
    y = cast(rotate(y, net.table(kCos), net.table(kSin), /*axis=*/1), config_.activations);
    return transpose(y, {0, 2, 1, 3});
  }

  Value attend(Network& net, Value x, const std::string& prefix) const {
    const Scope scope = net.scope("attn");
    const Value q = turned(net, x, prefix, "q", config_.heads);
    const Value k = turned(net, x, prefix, "k", config_.kv_heads);
    const Value v = transpose(heads_of(net, x, prefix, "v", config_.kv_heads), {0, 2, 1, 3});
    const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_size));
    const Value y = transpose(attention(q, k, v, scale, /*causal=*/true), {0, 2, 1, 3});
    return linear(net, reshape(y, {net.rows(), config_.heads * config_.head_size}), prefix,
                  "o_proj", config_.out_bias);
  }

  LlamaConfig config_;
};

}  // namespace

ModelPtr make_llama(const LlamaConfig& config) { return std::make_shared<Llama>(config); }

ModelPtr parse_llama(const Json& json) {
  LlamaConfig config = parse_llama_config(json);
  config.activations = parse_dtype(json.at("activations").get<std::string>());
  return make_llama(config);
}

}  // namespace logitless::train

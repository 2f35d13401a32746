#include "train/model/llama_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "json/json.h"
#include "logitless/error.h"
#include "train/json_number.h"
#include "train/run/bounds.h"

namespace logitless::train {
namespace {

struct Type {
  std::string_view name, architecture;
};
constexpr Type kTypes[] = {
    {"llama", "LlamaForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"}};

std::string_view architecture_of(std::string_view type) {
  for (const Type& t : kTypes) {
    if (t.name == type) return t.architecture;
  }
  return {};
}

// Typed access to the fields of a JSON object.
class Fields {
 public:
  Fields(const Json& json, std::string inside) : json_(json), inside_(std::move(inside)) {}

  // Returns a field; null where it is missing.
  const Json& at(const std::string& name) const {
    static const Json kNull;
    const Json* found = json_.find(name);
    return found != nullptr ? *found : kNull;
  }
  bool has(const std::string& name) const { return !at(name).is_null(); }

  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const {
    throw InvalidArgument(fmt::format("{}{}: expected {}, found {}", inside_, name, expected,
                                      has(name) ? at(name).dump() : "none"));
  }

  std::int64_t whole(const std::string& name, std::string_view bound) const {
    const WholeBounds& bounds = whole_bounds(bound);
    const Json& found = at(name);
    if (found.is_number_integer()) {
      const std::int64_t value = whole_number(found);
      if (bounds.allow(value)) return value;
    }
    refuse(name, bounds.expected().substr(std::string_view("expected ").size()));
  }
  std::int64_t whole(const std::string& name, std::string_view bound, std::int64_t none) const {
    return has(name) ? whole(name, bound) : none;
  }
  double positive(const std::string& name) const {
    const Json& found = at(name);
    if (found.is_number() && found.get<double>() > 0.0 && std::isfinite(found.get<double>()))
      return found.get<double>();
    refuse(name, "a number over 0");
  }
  double positive(const std::string& name, double none) const {
    return has(name) ? positive(name) : none;
  }
  bool flag(const std::string& name, bool none) const {
    if (!has(name)) return none;
    if (!at(name).is_boolean()) refuse(name, "true or false");
    return at(name).get<bool>();
  }
  // Refuses a field with any other value.
  void only(const std::string& name, const Json& value) const {
    if (has(name) && at(name) != value) refuse(name, value.dump());
  }
  // Refuses a field that is present.
  void none(const std::string& name) const {
    if (has(name)) refuse(name, "none");
  }

 private:
  const Json& json_;
  std::string inside_;
};

// Refuses features of other models of these families that this implementation lacks.
void refuse_other_models(const Fields& f, const std::string& type) {
  if (f.has("architectures")) {
    const Json& list = f.at("architectures");
    if (!list.is_array() || list.size() != 1 || list[0] != architecture_of(type))
      f.refuse("architectures", fmt::format("[\"{}\"]", architecture_of(type)));
  }
  f.only("hidden_act", "silu");
  f.only("mlp_bias", false);
  f.only("attention_dropout", 0.0);
  f.only("use_sliding_window", false);
  // Qwen's files have a window that use_sliding_window may switch off.
  if (type == "llama") f.none("sliding_window");
  if (f.has("layer_types")) {
    const Json& list = f.at("layer_types");
    if (!list.is_array() ||
        !std::all_of(list.begin(), list.end(), [](const Json& t) { return t == "full_attention"; }))
      f.refuse("layer_types", "\"full_attention\" of every layer");
  }
  f.only("partial_rotary_factor", 1.0);
  f.none("quantization_config");
}

// Reads rope_scaling and rope_theta, or rope_parameters, which transformers 5 writes instead.
void read_rope(const Fields& f, LlamaConfig& config) {
  const std::string name = f.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  config.theta = f.positive("rope_theta", 10000.0);
  if (!f.has(name)) return;
  if (!f.at(name).is_object()) f.refuse(name, "an object");
  const Fields rope(f.at(name), name + ".");
  config.theta = rope.positive("rope_theta", config.theta);
  rope.only("partial_rotary_factor", 1.0);
  const std::string key = rope.has("rope_type") || !rope.has("type") ? "rope_type" : "type";
  const Json& kind = rope.at(key);
  RopeScaling& s = config.scaling;
  if (kind == "default") return;
  if (kind == "linear") {
    s.kind = RopeScaling::Kind::linear;
    s.factor = rope.positive("factor");
  } else if (kind == "llama3") {
    s.kind = RopeScaling::Kind::llama3;
    s.factor = rope.positive("factor");
    s.low = rope.positive("low_freq_factor");
    s.high = rope.positive("high_freq_factor");
    s.original_context = rope.whole("original_max_position_embeddings", "context");
    if (s.high <= s.low) rope.refuse("high_freq_factor", "more than low_freq_factor");
  } else {
    rope.refuse(key, "\"default\", \"linear\" or \"llama3\"");
  }
}

Json rope_json(const RopeScaling& s) {
  switch (s.kind) {
    case RopeScaling::Kind::none:
      break;
    case RopeScaling::Kind::linear:
      return {{"rope_type", "linear"}, {"factor", s.factor}};
    case RopeScaling::Kind::llama3:
      return {{"rope_type", "llama3"},
              {"factor", s.factor},
              {"low_freq_factor", s.low},
              {"high_freq_factor", s.high},
              {"original_max_position_embeddings", s.original_context}};
  }
  return nullptr;
}

}  // namespace

bool is_llama_type(std::string_view model_type) { return !architecture_of(model_type).empty(); }

LlamaConfig parse_llama_config(const Json& json) {
  const Fields f(json, "");
  LlamaConfig config;
  const Json& type = f.at("model_type");
  if (!type.is_string() || !is_llama_type(type.get<std::string>()))
    f.refuse("model_type", "\"llama\", \"qwen2\" or \"qwen3\"");
  config.type = type.get<std::string>();
  refuse_other_models(f, config.type);
  config.vocab = f.whole("vocab_size", "vocab");
  config.context = f.whole("max_position_embeddings", "context");
  config.dim = f.whole("hidden_size", "dim");
  config.inner = f.whole("intermediate_size", "dim");
  config.layers = f.whole("num_hidden_layers", "layers");
  config.heads = f.whole("num_attention_heads", "heads");
  config.kv_heads = f.whole("num_key_value_heads", "heads", config.heads);
  if (config.heads % config.kv_heads != 0)
    f.refuse("num_key_value_heads",
             fmt::format("a divisor of num_attention_heads {}", config.heads));
  constexpr std::int64_t kQwen3HeadSize = 128;
  if (!f.has("head_dim") && config.type != "qwen3" && config.dim % config.heads != 0)
    f.refuse("head_dim",
             fmt::format("a number, as hidden_size {} is no multiple of num_attention_heads {}",
                         config.dim, config.heads));
  config.head_size = f.whole("head_dim", "dim",
                             config.type == "qwen3" ? kQwen3HeadSize : config.dim / config.heads);
  if (config.head_size % 2 != 0) {
    throw InvalidArgument(
        fmt::format("head_dim: expected an even number, found {}", config.head_size));
  }
  config.tied_head = f.flag("tie_word_embeddings", false);
  const bool bias = f.flag("attention_bias", false);
  if (config.type == "qwen2" && bias) f.refuse("attention_bias", "none");
  config.qkv_bias = bias || config.type == "qwen2";
  config.out_bias = bias;
  config.epsilon = f.positive("rms_norm_eps");
  config.deviation = f.positive("initializer_range", config.deviation);
  read_rope(f, config);
  config.bos_token_id = f.at("bos_token_id").dump();
  config.eos_token_id = f.at("eos_token_id").dump();
  return config;
}

Json llama_config_json(const LlamaConfig& c) {
  Json json = {{"architectures", {architecture_of(c.type)}},
               {"model_type", c.type},
               {"vocab_size", c.vocab},
               {"max_position_embeddings", c.context},
               {"hidden_size", c.dim},
               {"intermediate_size", c.inner},
               {"num_hidden_layers", c.layers},
               {"num_attention_heads", c.heads},
               {"num_key_value_heads", c.kv_heads},
               {"head_dim", c.head_size},
               {"hidden_act", "silu"},
               {"rms_norm_eps", c.epsilon},
               {"rope_theta", c.theta},
               {"rope_scaling", rope_json(c.scaling)},
               {"tie_word_embeddings", c.tied_head},
               {"initializer_range", c.deviation},
               {"bos_token_id", Json::parse(c.bos_token_id)},
               {"eos_token_id", Json::parse(c.eos_token_id)}};
  if (c.type != "qwen2") json["attention_bias"] = c.qkv_bias;
  if (c.type != "llama") json["use_sliding_window"] = false;
  return json;
}

// --- presets

namespace {

struct Preset {
  std::string_view name, type;
  std::int64_t vocab, context, dim, inner, layers, heads, kv_heads, head_size;
  bool tied;
  double epsilon, theta;
  double llama3_factor;  // 0: positions are not scaled
  std::int64_t bos_token_id, eos_token_id;
};
// The sizes in the config.json of the released models; llama-tiny is for experiments.
constexpr Preset kPresets[] = {
    {"llama-tiny", "llama", 8192, 2048, 128, 352, 4, 4, 2, 32, true, 1e-5, 1e4, 0.0, -1, -1},
    {"llama-2-7b", "llama", 32000, 4096, 4096, 11008, 32, 32, 32, 128, false, 1e-5, 1e4, 0.0, 1, 2},
    {"llama-3.1-8b", "llama", 128256, 131072, 4096, 14336, 32, 32, 8, 128, false, 1e-5, 5e5, 8.0,
     128000, 128001},
    {"llama-3.2-1b", "llama", 128256, 131072, 2048, 8192, 16, 32, 8, 64, true, 1e-5, 5e5, 32.0,
     128000, 128001},
    {"llama-3.2-3b", "llama", 128256, 131072, 3072, 8192, 28, 24, 8, 128, true, 1e-5, 5e5, 32.0,
     128000, 128001},
    {"qwen2.5-0.5b", "qwen2", 151936, 32768, 896, 4864, 24, 14, 2, 64, true, 1e-6, 1e6, 0.0, 151643,
     151643},
    {"qwen3-0.6b", "qwen3", 151936, 40960, 1024, 3072, 28, 16, 8, 128, true, 1e-6, 1e6, 0.0, 151643,
     151645},
};

const Preset* find_preset(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.name == name) return &preset;
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> llama_preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

bool is_llama_preset(std::string_view name) { return find_preset(name) != nullptr; }

LlamaConfig llama_preset(std::string_view name) {
  const Preset* p = find_preset(name);
  if (p == nullptr) throw InternalError(fmt::format("no preset '{}'", name));
  LlamaConfig config;
  config.type = p->type;
  config.vocab = p->vocab;
  config.context = p->context;
  config.dim = p->dim;
  config.inner = p->inner;
  config.layers = p->layers;
  config.heads = p->heads;
  config.kv_heads = p->kv_heads;
  config.head_size = p->head_size;
  config.tied_head = p->tied;
  config.qkv_bias = p->type == "qwen2";
  config.epsilon = p->epsilon;
  config.theta = p->theta;
  if (p->llama3_factor > 0.0)
    config.scaling = {RopeScaling::Kind::llama3, p->llama3_factor, 1.0, 4.0, 8192};
  if (p->bos_token_id >= 0) config.bos_token_id = fmt::format("{}", p->bos_token_id);
  if (p->eos_token_id >= 0) config.eos_token_id = fmt::format("{}", p->eos_token_id);
  return config;
}

}  // namespace logitless::train

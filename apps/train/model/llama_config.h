// The config.json of Llama and Qwen as transformers writes it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json/json.h"
#include "logitless/dtype.h"
#include "train/model/rope.h"

namespace logitless::train {

struct LlamaConfig {
  std::string type = "llama";  // model_type: "llama", "qwen2", "qwen3"
  std::int64_t vocab = 0;
  std::int64_t context = 0;  // max_position_embeddings
  std::int64_t dim = 0;      // hidden_size
  std::int64_t inner = 0;    // intermediate_size
  std::int64_t layers = 0;
  std::int64_t heads = 0;      // query heads; a multiple of kv_heads
  std::int64_t kv_heads = 0;   // heads of keys and values
  std::int64_t head_size = 0;  // even
  bool tied_head = false;      // tie_word_embeddings
  bool qkv_bias = false;       // attention_bias; always in Qwen 2
  bool out_bias = false;       // that of o_proj: attention_bias; never in Qwen 2
  double epsilon = 1e-6;       // rms_norm_eps
  double theta = 10000.0;      // rope_theta
  RopeScaling scaling;
  double deviation = 0.02;  // initializer_range: deviation of initial weights
  // bos_token_id and eos_token_id as JSON.
  std::string bos_token_id = "null", eos_token_id = "null";
  DType activations = DType::f32;  // not in the file

  bool has_qk_norm() const { return type == "qwen3"; }
  bool operator==(const LlamaConfig&) const = default;
};

bool is_llama_type(std::string_view model_type);

// Parses a config.json. Missing optional fields have transformers' defaults. Throws InvalidArgument
// "FIELD: expected ..., found ..." on what is missing or out of range, and on values that would
// change the model. Examples are another activation, sliding windows, biases of the MLP, quantised
// weights and other ways to scale positions. Fields without effect are not read.
LlamaConfig parse_llama_config(const Json& json);
// Returns the config as config.json, which has no activations.
Json llama_config_json(const LlamaConfig& config);

// Returns the names of released models: "llama-tiny", "llama-3.2-1b", "qwen3-0.6b", ...
std::vector<std::string> llama_preset_names();
bool is_llama_preset(std::string_view name);
// Returns a preset, by one of these names.
LlamaConfig llama_preset(std::string_view name);

}  // namespace logitless::train

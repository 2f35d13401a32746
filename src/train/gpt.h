// GPT-2 (Radford et al. 2019).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json/json.h"
#include "train/model.h"

namespace logitless::train {

struct GptConfig {
  std::int64_t vocab = 50257;
  std::int64_t context = 1024;  // positions there are
  std::int64_t dim = 768;
  std::int64_t heads = 12;
  std::int64_t layers = 12;
  bool tied_head = true;  // logits are products with wte.weight, else with lm_head.weight
  DType activations = DType::f32;

  bool operator==(const GptConfig&) const = default;
};

// "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl".
std::vector<std::string> gpt_preset_names();
// Throws InvalidArgument naming the presets.
GptConfig gpt_preset(std::string_view name);
// Throws InvalidArgument naming the field, what was expected and what came.
void check_config(const GptConfig& config);

// Weights of layers are [in, out], the tables and lm_head.weight [rows, dim]. Throws what
// check_config does.
std::vector<Parameter> gpt_parameters(const GptConfig& config);

// Throws what check_config does.
ModelPtr make_gpt(const GptConfig& config);
// Of a checkpoint's config. Throws InvalidArgument and JSON's exceptions.
ModelPtr parse_gpt(const Json& json);

}  // namespace logitless::train

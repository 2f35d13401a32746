// GPT-2 (Radford et al. 2019).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json/json.h"
#include "train/model/model.h"

namespace logitless::train {

struct GptConfig {
  std::int64_t vocab = 50257;
  std::int64_t context = 1024;  // number of positions
  std::int64_t dim = 768;
  std::int64_t heads = 12;
  std::int64_t layers = 12;
  bool tied_head = true;  // the head's weight is wte.weight, else lm_head.weight
  DType activations = DType::f32;

  bool operator==(const GptConfig&) const = default;
};

// Returns "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl".
std::vector<std::string> gpt_preset_names();
// Returns a preset. Throws InvalidArgument naming the presets.
GptConfig gpt_preset(std::string_view name);
// Throws InvalidArgument naming the field, its expected range and its value.
void check_config(const GptConfig& config);

// Returns the parameters. Weights of layers are [in, out]; embedding tables and lm_head.weight are
// [rows, dim]. Throws as check_config() does.
std::vector<Parameter> gpt_parameters(const GptConfig& config);

// Makes a GPT-2. Throws as check_config() does.
ModelPtr make_gpt(const GptConfig& config);
// Makes the model of a checkpoint's config. Throws InvalidArgument and JSON's exceptions.
ModelPtr parse_gpt(const Json& json);

}  // namespace logitless::train

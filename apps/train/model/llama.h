// Llama (Touvron et al. 2023, Grattafiori et al. 2024) and its relatives Qwen 2, 2.5 and 3: RMS
// norms, rotary positions, groups of query heads that share keys and values, a gated MLP.
#pragma once

#include "json/json.h"
#include "train/model/llama_config.h"
#include "train/model/model.h"

namespace logitless::train {

// Makes a model of this family. Weights are [out, in]; parameters have the names of Hugging Face's
// files. Throws InvalidArgument unless activations are f32 or bf16.
ModelPtr make_llama(const LlamaConfig& config);
// Makes the model of a checkpoint's config. Throws InvalidArgument and JSON's exceptions.
ModelPtr parse_llama(const Json& json);

}  // namespace logitless::train

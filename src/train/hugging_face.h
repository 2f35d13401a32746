// What stands beside the weights in a folder of Hugging Face: config.json and the tokenizer.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "train/gpt.h"
#include "train/llama_config.h"

namespace logitless::train {

using ModelConfig = std::variant<GptConfig, LlamaConfig>;

// Of a preset, of a config.json, or of a folder with one, which is a Llama's or a Qwen's. Throws
// InvalidArgument naming the presets, or the file and what it has.
ModelConfig find_model(const std::string& name);

// Of the weights in `path` (weight_files.h). Where the config.json beside it is a Llama's or a
// Qwen's, that. Else a GPT-2's sizes are those of the tensors; heads are config.json's, or else dim
// / 64 as in every GPT-2, 0 where that is not whole. Its head is tied unless the file has an
// lm_head.weight that differs from wte.weight. Throws InvalidArgument naming the file and what it
// lacks.
ModelConfig read_hugging_face_config(const std::string& path);

// The bytes of tokenizer.model (SentencePiece's) beside `path`, if there is one. Throws
// InvalidArgument where there is a tokenizer.json alone.
std::optional<std::string> read_hugging_face_tokenizer(const std::string& path);

// Throws InvalidArgument when the config.json beside `path` is not of this model_type, and so not
// to be replaced; DeviceError when a file beside `path` cannot be written.
void check_hugging_face_folder(const std::string& path, const std::string& model_type);

// config.json beside `path`, of weights in `dtype`, and, of a tokenizer with this model,
// tokenizer.model (SentencePiece's), tokenizer.json and tokenizer_config.json (of transformers).
// `end_of_text` is its word between two texts. Throws DeviceError.
void save_hugging_face_folder(const std::string& path, const Model& model, DType dtype,
                              const std::string* tokenizer_model, int end_of_text);

}  // namespace logitless::train

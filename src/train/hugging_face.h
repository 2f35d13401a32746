// What stands beside the weights in a folder of Hugging Face: config.json and the tokenizer.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "train/gpt.h"
#include "train/llama_config.h"
#include "train/tokenizer.h"
#include "train/weight_files.h"

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

bool has_hugging_face_tokenizer(const std::string& path);

// tokenizer.model (SentencePiece's) beside `path`, with the tokenizer.json and
// tokenizer_config.json beside it for an export, or else tokenizer.json. Of tokenizer.json the word
// between two texts is eos_token of tokenizer_config.json, or else eos_token_id of config.json, the
// first of several. Throws InvalidArgument naming the file where neither has it or there is no
// tokenizer.
TokenizerModel read_hugging_face_tokenizer(const std::string& path);

// The files of an export beside its weights.
inline constexpr const char* kExportedBeside[] = {"config.json", "tokenizer.model",
                                                  "tokenizer.json", "tokenizer_config.json"};

// Throws InvalidArgument when the config.json beside `path` is not of this model_type, and so not
// to be replaced; DeviceError when a file beside `path` cannot be written.
void check_hugging_face_folder(const std::string& path, const std::string& model_type);

// Returns what a tokenizer has that no tokenizer.json made of it would have, so that its export has
// none; "" where it has one.
std::string missing_fast_tokenizer(const TokenizerModel& model);

// Writes weights, config.json and, with a tokenizer, its files in place of the model that is there
// (export_files.h), and removes those of another. Files of a tokenizer that was made elsewhere are
// written byte for byte: tokenizer.model, tokenizer.json and tokenizer_config.json, as many as
// there were. Of a SentencePiece model without a tokenizer.json that file and tokenizer_config.json
// are made where they give the same words. `path` is what export_path() returns. Throws
// DeviceError.
void export_model(const std::string& path, const Model& model, const TensorSet& values,
                  const SaveOptions& options, const Tokenizer* tokenizer);

}  // namespace logitless::train

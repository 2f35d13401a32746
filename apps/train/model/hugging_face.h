// config.json and the tokenizer, which lie next to the weights in a folder of Hugging Face.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "train/model/gpt.h"
#include "train/model/llama_config.h"
#include "train/model/weight_files.h"
#include "train/tokenizer/tokenizer.h"

namespace logitless::train {

using ModelConfig = std::variant<GptConfig, LlamaConfig>;

// Returns the model of a preset, a config.json, or a folder with a config.json, which is a Llama's
// or a Qwen's. Throws InvalidArgument naming the presets, or the file and its content.
ModelConfig find_model(const std::string& name);

// Returns the model of the weights in `path` (weight_files.h): that of the config.json next to
// them, where it is a Llama's or a Qwen's, else a GPT-2. A GPT-2's sizes are those of the tensors.
// Its number of heads is config.json's, or else dim / 64 as in every GPT-2, 0 where that is not
// whole. Its head is tied unless the file has an lm_head.weight that differs from wte.weight.
// Throws InvalidArgument naming the file and what is missing.
ModelConfig read_hugging_face_config(const std::string& path);

bool has_hugging_face_tokenizer(const std::string& path);

// Reads tokenizer.model (SentencePiece's) next to `path`, or else tokenizer.json. With a
// tokenizer.model it also reads tokenizer.json and tokenizer_config.json, for an export. With
// tokenizer.json the word between two texts is eos_token of tokenizer_config.json, or else the
// first eos_token_id of config.json. Throws InvalidArgument naming the file where neither has it or
// there is no tokenizer.
TokenizerModel read_hugging_face_tokenizer(const std::string& path);

// The files of an export other than its weights.
inline constexpr const char* kExportedBeside[] = {"config.json", "tokenizer.model",
                                                  "tokenizer.json", "tokenizer_config.json"};

// Throws InvalidArgument when the config.json next to `path` has another model_type and must not be
// replaced. Throws DeviceError when a file next to `path` cannot be written.
void check_hugging_face_folder(const std::string& path, const std::string& model_type);

// Returns the feature of a tokenizer that tokenizer.json cannot express, so that an export has no
// such file; "" where it can.
std::string missing_fast_tokenizer(const TokenizerModel& model);

// Writes weights, config.json and, with a tokenizer, its files over the existing model
// (export_files.h). Removes the files of another tokenizer. `path` is a result of export_path().
// The files of an imported tokenizer are written byte for byte: tokenizer.model, tokenizer.json and
// tokenizer_config.json, as many as there were. For a SentencePiece model without tokenizer.json,
// that file and tokenizer_config.json are made where they give the same words. Throws DeviceError.
void export_model(const std::string& path, const Model& model, const TensorSet& values,
                  const SaveOptions& options, const Tokenizer* tokenizer);

}  // namespace logitless::train

// What stands beside Hugging Face's model.safetensors of a GPT-2: config.json and the tokenizer.
#pragma once

#include <optional>
#include <string>

#include "train/gpt.h"

namespace logitless::train {

// The sizes of the tensors in `path`; heads from config.json beside it, or else dim / 64 as in
// every GPT-2, 0 where that is not whole. The head is tied unless the file has an lm_head.weight
// that differs from wte.weight. Throws InvalidArgument naming the file and what it lacks.
GptConfig read_hugging_face_sizes(const std::string& path);

// The bytes of tokenizer.model (SentencePiece's) beside `path`, if there is one.
std::optional<std::string> read_hugging_face_tokenizer(const std::string& path);

// Throws InvalidArgument when the config.json beside `path` is not of a GPT-2, and so not to be
// replaced; DeviceError when a file beside `path` cannot be written.
void check_hugging_face_folder(const std::string& path);

// config.json beside `path` and, of a tokenizer with this model, tokenizer.model (SentencePiece's),
// tokenizer.json and tokenizer_config.json (of transformers). `end_of_text` is its word between two
// texts. Throws DeviceError.
void save_hugging_face_folder(const std::string& path, const GptConfig& config,
                              const std::string* tokenizer_model, int end_of_text);

}  // namespace logitless::train

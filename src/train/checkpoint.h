// A training run on disk, and the weights of Hugging Face's GPT-2. Both are one safetensors file,
// written atomically. Errors are InvalidArgument and name the file, the tensor or the metadata,
// what was expected and what was found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/gpt.h"
#include "train/tensor_set.h"

namespace logitless::train {

// All state of a run beside its tensors. The order of the data is a function of seed and windows.
struct RunState {
  std::int64_t step = 0;     // done
  std::int64_t windows = 0;  // of the data that they have read
  std::uint64_t seed = 1;
  std::string data;     // Dataset::key() in hexadecimal digits
  std::string options;  // the caller's, as JSON
  // Of the head, whose far field has its own file; none without.
  std::optional<std::int64_t> far_steps = {};
};

// f32 tensors NAME, optimizer.m.NAME and optimizer.v.NAME for each parameter; the rest is metadata.
// The same run gives the same bytes.
void save_checkpoint(const std::string& path, const GptConfig& config, const RunState& state,
                     const TensorSet& values, const TensorSet& m, const TensorSet& v);

struct CheckpointHeader {
  GptConfig config;
  RunState state;
};
CheckpointHeader read_checkpoint_header(const std::string& path);

// Into tensors of a model of this config, which must be the checkpoint's.
void load_checkpoint(const std::string& path, const GptConfig& config, const TensorSet& values,
                     const TensorSet& m, const TensorSet& v);

// model.safetensors of GPT-2 as Hugging Face stores it: f32, names with or without "transformer.".
// Attention masks (h.N.attn.bias, h.N.attn.masked_bias) are skipped. lm_head.weight may be missing:
// an untied head then starts as a copy of wte.weight; with a tied one it must equal wte.weight.
void load_hugging_face(const std::string& path, const GptConfig& config, const TensorSet& values);
void save_hugging_face(const std::string& path, const GptConfig& config, const TensorSet& values);

}  // namespace logitless::train

// A training run on disk: one safetensors file, written atomically. Errors are InvalidArgument.
// They name the file and the tensor or metadata, with the expected and the actual value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/model/model.h"
#include "train/optimizer/tensor_set.h"

namespace logitless::train {

// The metadata "format" of a checkpoint.
inline constexpr const char* kCheckpointFormat = "logitless train 1";

// All state of a run besides its tensors. The order of the data is a function of seed and windows.
struct RunState {
  std::int64_t step = 0;     // steps done
  std::int64_t windows = 0;  // windows of the data read by these steps
  std::uint64_t seed = 1;
  std::string data;     // Dataset::key() in hexadecimal digits
  std::string options;  // the caller's options, as JSON
  // Steps of the far-field head, whose state is in a file of its own; none without a far field.
  std::optional<std::int64_t> far_steps = {};
};

// Writes f32 tensors NAME, optimizer.m.NAME and optimizer.v.NAME for each parameter, and metadata.
// The same run gives the same bytes.
void save_checkpoint(const std::string& path, const Model& model, const RunState& state,
                     const TensorSet& values, const TensorSet& m, const TensorSet& v);

struct CheckpointHeader {
  ModelPtr model;
  RunState state;
};
CheckpointHeader read_checkpoint_header(const std::string& path);

// Loads into tensors of `model`, which must equal the checkpoint's.
void load_checkpoint(const std::string& path, const Model& model, const TensorSet& values,
                     const TensorSet& m, const TensorSet& v);

}  // namespace logitless::train

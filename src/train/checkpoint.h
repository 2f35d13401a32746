// A training run on disk: one safetensors file, written atomically. Errors are InvalidArgument and
// name the file, the tensor or the metadata, what was expected and what was found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/model.h"
#include "train/tensor_set.h"

namespace logitless::train {

// The metadata "format" of a checkpoint.
inline constexpr const char* kCheckpointFormat = "logitless train 1";

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
void save_checkpoint(const std::string& path, const Model& model, const RunState& state,
                     const TensorSet& values, const TensorSet& m, const TensorSet& v);

struct CheckpointHeader {
  ModelPtr model;
  RunState state;
};
CheckpointHeader read_checkpoint_header(const std::string& path);

// Into tensors of this model, which must be the checkpoint's.
void load_checkpoint(const std::string& path, const Model& model, const TensorSet& values,
                     const TensorSet& m, const TensorSet& v);

}  // namespace logitless::train

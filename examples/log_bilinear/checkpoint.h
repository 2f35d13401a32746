// A training run on disk: weights, optimiser sums and position, in one safetensors file.
#pragma once

#include <logitless/tensor_file.h>

#include <cstdint>
#include <map>
#include <string>

#include "model.h"
#include "optimizer.h"

namespace log_bilinear {

// Position in a run. The file has tensors model.<parameter> and optimizer.<parameter>.<sum>, f32,
// and training.position i64 [3]: steps done, seed, examples drawn. The order of examples is a
// function of the last two (see examples.h), so there is no other random state. Metadata are the
// training options, and the hashes of tokenizer and text. The same run gives the same bytes.
struct Position {
  std::int64_t step = 0;
  std::uint64_t seed = 0;
  std::int64_t examples = 0;
};

// Atomic: readers find the old file or the new one. Throws as write_safetensors does.
void save_checkpoint(const std::string& path, const Model& model, const Optimizer& optimizer,
                     const Position& position, const std::map<std::string, std::string>& metadata);

// Throws std::runtime_error naming the tensor or the metadata in which file and run differ. "steps"
// may differ.
Position load_checkpoint(const std::string& path, Model& model, Optimizer& optimizer,
                         const std::map<std::string, std::string>& metadata);

}  // namespace log_bilinear

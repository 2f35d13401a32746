// Layout of the workspace of sample_tokens (device/sample.h).
#pragma once

#include <cstddef>

#include "kernels/device/head.h"

namespace logitless::cuda {

// Byte offsets; rows are padded_tokens(tokens).
struct SampleLayout {
  explicit SampleLayout(const ForwardShape& shape);

  std::size_t forward = 0;     // of TileLayout
  std::size_t bad_target = 0;  // u64
  std::size_t greatest = 0;    // f32 [rows]: the greatest logit of each token
  std::size_t best = 0;        // u64 [rows]: its best score and entry so far
  std::size_t logits = 0;      // f32 [tokens, padded_vocab(vocab)]
  std::size_t total = 0;
};

}  // namespace logitless::cuda

// Layout of the workspace of sample_tokens and best_entries (device/sample.h).
#pragma once

#include <cstddef>

#include "kernels/device/kernel.h"

namespace logitless::cuda {

// Byte offsets; rows are padded_tokens(tokens).
struct SampleLayout {
  SampleLayout(const DeviceKernel& kernel, const ForwardShape& shape);

  std::size_t forward = 0;     // of the kernel
  std::size_t tile_tops = 0;   // f32 [vocabulary tiles][rows]: StoredForward::store
  std::size_t bad_target = 0;  // u64
  std::size_t greatest = 0;    // f32 [rows]: the greatest logit of each token
  std::size_t least = 0;       // f32 [rows]: the least s that top_k and top_p keep
  std::size_t best = 0;        // u64 [rows]: its best score and entry so far
  std::size_t logits = 0;      // f32 [tokens, padded_vocab(vocab)]
  std::size_t total = 0;
};

// StoredForward::unit_tokens of the cuBLAS head: the tokens of a strip.
std::int64_t cublas_unit_tokens(const ForwardShape& shape);

}  // namespace logitless::cuda

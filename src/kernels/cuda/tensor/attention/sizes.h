// Scratch layout of attention. No CUDA: plans are made without a device, and in a build without
// CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/attention.h"

namespace logitless::cuda {

// Queries of a tile in the Hopper backward, by the width of its kernel: 64 or 128.
constexpr int attention_query_tile(int width) { return width == 64 ? 128 : 64; }
constexpr int attention_width(std::int64_t dim) { return dim <= 64 ? 64 : 128; }

// Byte offsets in the scratch of the Hopper backward.
struct AttentionBackwardOffsets {
  explicit AttentionBackwardOffsets(const AttentionCall& call);
  std::int64_t padded;  // queries, padded to full tiles
  std::size_t rows, counters, delta, counters_at, d_q, bytes;
};

}  // namespace logitless::cuda

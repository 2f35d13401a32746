// Workspace layout of scatter_add, and its tile sizes. No CUDA: plans are made without a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/index.h"

namespace logitless::cuda {

// Radix sort: digits of kDigitBits bits, tiles of kSortTile keys.
inline constexpr int kDigitBits = 8;
inline constexpr int kDigits = 1 << kDigitBits;
inline constexpr int kSortThreads = 256;
inline constexpr int kRounds = 8;  // keys of each thread
inline constexpr int kSortTile = kSortThreads * kRounds;
// Updates that a thread sums at a time.
inline constexpr int kRun = 128;

constexpr std::int64_t tiles_of(std::int64_t count, std::int64_t tile) {
  return (count + tile - 1) / tile;
}

// Byte offsets, multiples of 256.
struct ScatterPositions {
  std::size_t keys[2], positions[2], counts, heads, tails, end;
};
ScatterPositions positions_of(const ScatterCall& call);

}  // namespace logitless::cuda

// Importance sampling of the far field: the skipped pairs of a tile (a group, on a GPU) and a block
// of tokens that a call computes exactly. They stand for the others in d_weight and d_bias
// (docs/use/far_field.md).
#pragma once

#include <cstdint>

#include "math/mix.h"

namespace logitless {

// Samples every `every`-th block of each tile, with a start that differs between tiles. Over
// `every` seeds, from a multiple of it on, each pair is sampled once. Later seeds use another
// permutation.
struct FarSample {
  std::int64_t every = 0;  // 0: none
  std::uint64_t key = 0;
  std::uint64_t phase = 0;  // < every
  // First tile of this rank among the tiles of all ranks, so that ranks sample different blocks.
  std::int64_t first_tile = 0;

  FarSample() = default;
  // `chunk` distinguishes the chunks of a call.
  FarSample(std::int64_t sample_every, std::uint64_t seed, std::int64_t chunk)
      : every(sample_every) {
    if (every == 0) return;
    const auto period = static_cast<std::uint64_t>(every);
    key = mix64(seed / period ^ mix64(static_cast<std::uint64_t>(chunk)));
    phase = seed % period;
  }
  // Returns the first block that a tile samples, below `every`; -1: none.
  LOGITLESS_HOST_DEVICE std::int64_t first_of(std::int64_t tile) const {
    if (every == 0) return -1;
    const auto period = static_cast<std::uint64_t>(every);
    const std::uint64_t first = mix64(key ^ static_cast<std::uint64_t>(first_tile + tile)) % period;
    return static_cast<std::int64_t>((first + phase) % period);
  }
  bool takes(std::int64_t tile, std::int64_t block) const {
    return every > 0 && block % every == first_of(tile);
  }
};

}  // namespace logitless

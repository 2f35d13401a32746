#include "head/cuda/word_ranges.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace logitless::cuda {

WordRanges word_ranges(std::int64_t tokens, std::int64_t vocab, std::int64_t dim,
                       std::int64_t element, int count) {
  constexpr std::int64_t kTile = 256;  // words
  const std::int64_t tile_bytes = std::max<std::int64_t>(tokens, 1) * kTile * 2;
  const std::int64_t row_bytes = dim * element;
  const std::int64_t tiles = (vocab + kTile - 1) / kTile;
  if (count < 2 || count > kMostWordRanges || tiles < count) return {};
  // Tiles of the ranges where the last has so many and each other as many as have room.
  using Lengths = std::array<std::int64_t, kMostWordRanges>;
  const auto lengths_with = [&](std::int64_t last) {
    Lengths lengths{};
    lengths[count - 1] = last;
    std::int64_t rows = vocab - (tiles - last) * kTile;
    for (int r = count - 2; r >= 0; --r) {
      lengths[r] = std::min(rows * row_bytes / tile_bytes, lengths[r + 1]);
      rows = lengths[r] * kTile;
    }
    return lengths;
  };
  const auto beyond = [&](const Lengths& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), -tiles);
  };
  std::int64_t low = 0;  // too few
  std::int64_t high = tiles;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (beyond(lengths_with(middle)) >= 0 ? high : low) = middle;
  }
  Lengths lengths = lengths_with(high);
  lengths[0] -= beyond(lengths);
  if (lengths[0] < 1) return {};
  WordRanges out;
  out.count = count;
  for (int r = 1; r < count; ++r)
    out.first[r] = out.first[r - 1] + static_cast<std::int32_t>(lengths[r - 1] * kTile);
  out.first[count] = static_cast<std::int32_t>(vocab);
  return out;
}

}  // namespace logitless::cuda

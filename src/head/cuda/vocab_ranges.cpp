#include "head/cuda/vocab_ranges.h"

#include <algorithm>
#include <numeric>

namespace logitless::cuda {
namespace {

constexpr std::int64_t kTile = kBlockPadding;  // vocabulary entries

std::int64_t tile_bytes(std::int64_t tokens, const RowBytes& row) {
  return tokens * kTile * row.number;
}

// Tiles whose exponentials fit into a number of rows.
struct Capacity {
  Capacity(std::int64_t tokens, std::int64_t rows, const RowBytes& row)
      : weight(rows * row.weight / tile_bytes(tokens, row)),
        low(rows * row.low / tile_bytes(tokens, row)) {}
  std::int64_t weight, low;
};

struct Kept {
  std::int64_t tokens;
  std::int64_t vocab_count;  // in the blocks
  std::int64_t beyond;       // rows of other entries, after those of the blocks
  RowBytes row;
  int count;
};

using Lengths = std::array<std::int64_t, kMaxVocabRanges>;  // tiles

// Returns the lengths of the blocks for a given length of the last. Each earlier block is as long
// as fits into the next one's rows. Without rows beyond, it is no longer than the next one; else
// the second to last also uses the rows beyond.
Lengths lengths_with(const Kept& k, std::int64_t last) {
  Lengths lengths{};
  lengths[k.count - 1] = last;
  const std::int64_t tiles = (k.vocab_count + kTile - 1) / kTile;
  std::int64_t rows = k.vocab_count - (tiles - last) * kTile + k.beyond;
  for (int r = k.count - 2; r >= 0; --r) {
    const Capacity capacity(k.tokens, rows, k.row);
    lengths[r] = capacity.weight + capacity.low;
    if (k.beyond == 0) lengths[r] = std::min(lengths[r], lengths[r + 1]);
    rows = lengths[r] * kTile;
  }
  return lengths;
}
std::int64_t beyond_all(const Kept& k, const Lengths& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), -((k.vocab_count + kTile - 1) / kTile));
}

void append(AliasedRanges& out, std::int64_t tiles, AliasedRanges::Place place,
            std::int64_t vocab_count) {
  VocabRanges& parts = out.ranges;
  out.places[parts.count] = place;
  ++parts.count;
  parts.first[parts.count] = static_cast<std::int32_t>(
      std::min(vocab_count, parts.first[parts.count - 1] + tiles * kTile));
}

// Lays out the blocks, possibly in two parts each. `lengths` cover all tiles or more.
AliasedRanges lay_out(const Kept& k, Lengths lengths) {
  lengths[0] -= beyond_all(k, lengths);
  if (lengths[0] < 1) return {};
  AliasedRanges out;
  std::int64_t next = 0;  // first entry of block r + 1
  for (int r = 0; r < k.count; ++r) {
    if (out.ranges.count + 2 > kMaxVocabRanges + (r + 1 == k.count ? 1 : 0)) return {};
    next += lengths[r] * kTile;
    if (r + 1 == k.count) {
      append(out, lengths[r], {}, k.vocab_count);
      break;
    }
    const std::int64_t rows =
        r + 2 == k.count ? k.vocab_count - next + k.beyond : lengths[r + 1] * kTile;
    const Capacity capacity(k.tokens, rows, k.row);
    const std::int64_t in_weight = std::min(lengths[r], capacity.weight);
    const auto row = static_cast<std::int32_t>(next);
    if (in_weight > 0) append(out, in_weight, {false, row}, k.vocab_count);
    if (in_weight < lengths[r]) append(out, lengths[r] - in_weight, {true, row}, k.vocab_count);
  }
  return out;
}

}  // namespace

AliasedRanges aliased_ranges(std::int64_t tokens, std::int64_t vocab, const RowBytes& row,
                             int count) {
  const Kept kept{std::max<std::int64_t>(tokens, 1), vocab, 0, row, count};
  const std::int64_t tiles = (vocab + kTile - 1) / kTile;
  if (count < 2 || count > kMaxVocabRanges || tiles < count) return {};
  std::int64_t fewer = 0;  // number of tiles that is too small
  std::int64_t last = tiles;
  while (last - fewer > 1) {
    const std::int64_t middle = fewer + (last - fewer) / 2;
    (beyond_all(kept, lengths_with(kept, middle)) >= 0 ? last : fewer) = middle;
  }
  return lay_out(kept, lengths_with(kept, last));
}

AliasedRanges saved_ranges(std::int64_t tokens, std::int64_t vocab, const RowBytes& row, int count,
                           std::int64_t last) {
  const std::int64_t last_tiles = last / kTile;
  if (count < 2 || count > kMaxVocabRanges || last_tiles < 1) return {};
  const auto kept = [&](std::int64_t tiles) {
    return Kept{std::max<std::int64_t>(tokens, 1), tiles * kTile, vocab - tiles * kTile, row,
                count};
  };
  const auto fits = [&](std::int64_t tiles) {
    return beyond_all(kept(tiles), lengths_with(kept(tiles), last_tiles)) >= 0;
  };
  std::int64_t tiles = last_tiles;
  std::int64_t more = vocab / kTile;
  while (more - tiles > 1) {
    const std::int64_t middle = tiles + (more - tiles) / 2;
    (fits(middle) ? tiles : more) = middle;
  }
  if (tiles <= last_tiles) return {};
  return lay_out(kept(tiles), lengths_with(kept(tiles), last_tiles));
}

AliasedBlock aliased_block(std::int64_t tokens, std::int64_t vocab, const RowBytes& row,
                           std::int64_t first, std::int64_t least) {
  const std::int64_t rest = vocab - first;
  const std::int64_t tiles =
      rest * row.weight / (tile_bytes(std::max<std::int64_t>(tokens, 1), row) + kTile * row.weight);
  if (tiles * kTile > least && rest > least) return {tiles * kTile, true};
  return {std::min(least, rest), false};
}

}  // namespace logitless::cuda

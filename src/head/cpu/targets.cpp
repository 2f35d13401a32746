#include "head/cpu/targets.h"

#include <algorithm>

#include "core/check.h"

namespace logitless::cpu {

std::int64_t TargetReader::valid_rows(std::int64_t tokens, std::int64_t vocab,
                                      std::int64_t* rows) const {
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < tokens; ++row) {
    const bool shifted_out = sequence_ > 0 && row % sequence_ == sequence_ - 1;
    bool any = false;
    for (int k = 0; k < per_token_ && !shifted_out; ++k) {
      const std::int64_t from = sequence_ > 0 ? row + 1 : row;
      const std::int64_t value = load_index(data_, dtype_, index_(from * per_token_ + k));
      if (value == ignore_index_) continue;
      require(value >= 0 && value<vocab, "targets: ", value, " at position ", from, per_token_> 1
                  ? concat(", entry ", k)
                  : "",
              " is outside [0, ", vocab, ") and not ignore_index ", ignore_index_);
      any = true;
    }
    if (any) rows[count++] = row;
  }
  return count;
}

void read_targets(const TargetReader& targets, const std::int64_t* rows, std::int64_t count,
                  std::int32_t* vocab_ids) {
  const int per_token = targets.per_token();
  for (std::int64_t t = 0; t < count; ++t) {
    for (int k = 0; k < per_token; ++k)
      vocab_ids[t * per_token + k] = static_cast<std::int32_t>(targets.vocab_id(rows[t], k));
  }
}

void sort_targets(const ChunkTargets& to, std::int64_t count, int per_token, std::int64_t vocab,
                  const LocalRows& places) {
  const std::int64_t tiles = ceil_div(vocab, kVocabTile);
  std::int32_t* const tile_begin = to.tile_begin;
  std::fill(tile_begin, tile_begin + tiles + 1, 0);
  for (std::int64_t slot = 0; slot < count * per_token; ++slot) {
    const std::int32_t vocab_id = to.vocab_ids[slot];
    const std::int32_t at = vocab_id < 0 ? -1 : places(vocab_id);
    to.places[slot] = at;
    if (at >= 0) ++tile_begin[at / kVocabTile + 1];
  }
  for (std::int64_t tile = 0; tile < tiles; ++tile) tile_begin[tile + 1] += tile_begin[tile];
  // A stable counting sort. Each tile_begin[tile] advances to the end of its tile, so the array is
  // shifted back by one tile afterwards.
  for (std::int64_t slot = 0; slot < count * per_token; ++slot) {
    const std::int32_t at = to.places[slot];
    if (at < 0) continue;
    const auto token = static_cast<std::int32_t>(slot / per_token);
    to.entries[tile_begin[at / kVocabTile]++] = {token, at, static_cast<std::int32_t>(slot)};
  }
  for (std::int64_t tile = tiles; tile > 0; --tile) tile_begin[tile] = tile_begin[tile - 1];
  tile_begin[0] = 0;
}

}  // namespace logitless::cpu

// Targets as the engine wants them: which rows count, and a chunk's (token, word) pairs by
// vocabulary tile.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "head/shard_words.h"
#include "head/validate.h"
#include "kernels/cpu_head.h"

namespace logitless::cpu {

// Reads targets [...] or [..., K], shifted by one position when they are the tokens themselves.
class TargetReader {
 public:
  // sequence = T: row i reads the target of row i + 1, and the last row of each T is ignored. 0:
  // row i reads its own.
  TargetReader(const ConstTensorView& targets, int per_token, std::int64_t ignore_index,
               std::int64_t sequence)
      : data_(targets.data()),
        dtype_(targets.dtype()),
        index_(targets),
        per_token_(per_token),
        ignore_index_(ignore_index),
        sequence_(sequence) {}

  int per_token() const { return per_token_; }
  // Word of entry k of a row, or -1 where it is ignored. The range is not checked.
  std::int64_t word(std::int64_t row, int k) const {
    if (sequence_ > 0) {
      if (row % sequence_ == sequence_ - 1) return -1;
      ++row;
    }
    const std::int64_t value = load_index(data_, dtype_, index_(row * per_token_ + k));
    return value == ignore_index_ ? -1 : value;
  }
  // Writes the rows with a target into `rows` and returns their number. Throws InvalidArgument
  // naming the first target that is neither ignore_index nor in [0, vocab), with its position.
  std::int64_t valid_rows(std::int64_t tokens, std::int64_t vocab, std::int64_t* rows) const;

 private:
  const void* data_;
  DType dtype_;
  FlatIndex index_;
  int per_token_;
  std::int64_t ignore_index_;
  std::int64_t sequence_;
};

// Where the words of a vocabulary are among those that a kernel walks.
class WordPlaces {
 public:
  // Every word here at its own row, or at positions[row].
  explicit WordPlaces(const ShardWords& words, const std::int32_t* positions = nullptr)
      : words_(words), positions_(positions) {}
  // -1: the word is not here.
  std::int32_t operator()(std::int64_t word) const {
    const std::int32_t row = words_.row(word);
    return positions_ != nullptr && row >= 0 ? positions_[row] : row;
  }

 private:
  ShardWords words_;
  const std::int32_t* positions_;
};

// The targets of a chunk: `words` for what is said of the whole vocabulary, the rest for what walks
// the rows of weight.
struct ChunkTargets {
  std::int32_t* words = nullptr;       // [count K]: targets, -1 where ignored
  std::int32_t* places = nullptr;      // [count K]: -1 where not here, too; may be `words`
  SparseEntry* entries = nullptr;      // [count K]: of those here
  std::int32_t* tile_begin = nullptr;  // [tiles + 1]
};
// Fills words [count K] from the rows of a chunk.
void read_targets(const TargetReader& targets, const std::int64_t* rows, std::int64_t count,
                  std::int32_t* words);
// Fills the rest from words, for a kernel that walks `vocab` words; entries come out by tile, and
// by token within a tile. An entry's word is its place, and tiles are of places.
void sort_targets(const ChunkTargets& to, std::int64_t count, int per_token, std::int64_t vocab,
                  const WordPlaces& places);

}  // namespace logitless::cpu

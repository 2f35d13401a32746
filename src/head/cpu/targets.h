// Targets in the engine's form: the valid rows, and a chunk's (token, entry) pairs by vocabulary
// tile.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "head/validate.h"
#include "head/vocab_shard.h"
#include "kernels/cpu_head.h"

namespace logitless::cpu {

// Reads targets [...] or [..., K], shifted by one if the targets are the input tokens themselves.
class TargetReader {
 public:
  // sequence = T: row i reads the target of row i + 1, and the last row of each T is ignored. 0:
  // row i reads the target of index i.
  TargetReader(const ConstTensorView& targets, int per_token, std::int64_t ignore_index,
               std::int64_t sequence)
      : data_(targets.data()),
        dtype_(targets.dtype()),
        index_(targets),
        per_token_(per_token),
        ignore_index_(ignore_index),
        sequence_(sequence) {}

  int per_token() const { return per_token_; }
  // Returns the token id of target k of a row, or -1 if it is ignored. The range is not checked.
  std::int64_t vocab_id(std::int64_t row, int k) const {
    if (sequence_ > 0) {
      if (row % sequence_ == sequence_ - 1) return -1;
      ++row;
    }
    const std::int64_t value = load_index(data_, dtype_, index_(row * per_token_ + k));
    return value == ignore_index_ ? -1 : value;
  }
  // Writes the rows with a target into `rows` and returns their number. Throws InvalidArgument
  // naming the first target that is neither ignore_index nor in [0, vocab), and its index.
  std::int64_t valid_rows(std::int64_t tokens, std::int64_t vocab, std::int64_t* rows) const;

 private:
  const void* data_;
  DType dtype_;
  FlatIndex index_;
  int per_token_;
  std::int64_t ignore_index_;
  std::int64_t sequence_;
};

// Maps token ids to indices in the kernel's vocabulary.
class LocalRows {
 public:
  // Maps each local entry to its row, or to positions[row].
  explicit LocalRows(const VocabShard& vocab, const std::int32_t* positions = nullptr)
      : vocab_(vocab), positions_(positions) {}
  // Returns -1 if the entry is not local.
  std::int32_t operator()(std::int64_t vocab_id) const {
    const std::int32_t row = vocab_.row(vocab_id);
    return positions_ != nullptr && row >= 0 ? positions_[row] : row;
  }

 private:
  VocabShard vocab_;
  const std::int32_t* positions_;
};

// The targets of a chunk: `vocab_ids` for the global vocabulary, the rest for kernels that go
// through the local rows of weight.
struct ChunkTargets {
  std::int32_t* vocab_ids = nullptr;   // [count K]: targets, -1 where ignored
  std::int32_t* places = nullptr;      // [count K]: -1 also where not local; may be `vocab_ids`
  SparseEntry* entries = nullptr;      // [count K]: of local targets
  std::int32_t* tile_begin = nullptr;  // [tiles + 1]
};
// Fills `vocab_ids` [count K] with the targets of a chunk's rows.
void read_targets(const TargetReader& targets, const std::int64_t* rows, std::int64_t count,
                  std::int32_t* vocab_ids);
// Fills the other arrays from `vocab_ids`, for a kernel with `vocab` local entries. Entries are
// sorted by tile, and by token within a tile. Their ids and their tiles are indices in the kernel's
// vocabulary.
void sort_targets(const ChunkTargets& to, std::int64_t count, int per_token, std::int64_t vocab,
                  const LocalRows& places);

}  // namespace logitless::cpu

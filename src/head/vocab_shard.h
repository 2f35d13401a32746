// Maps the rows of a rank's weight to entries of the global vocabulary, and back.
#pragma once

#include <algorithm>
#include <cstdint>

#include "logitless/sharding.h"

namespace logitless {

class VocabShard {
 public:
  // The full vocabulary: entry i is row i.
  explicit VocabShard(std::int64_t rows) : rows_(rows) {}
  // Entries [first, first + rows), or those of an ascending table [rows].
  VocabShard(std::int64_t first, std::int64_t rows, const std::int32_t* table)
      : rows_(rows), first_(first), table_(table) {}
  VocabShard(const Sharding& sharding, std::int64_t rows)
      : rows_(rows),
        first_(sharding.vocab_begin),
        table_(static_cast<const std::int32_t*>(sharding.vocab_ids.data())) {}

  // Returns the entries of rows [first, first + rows).
  VocabShard part(std::int64_t first, std::int64_t rows) const {
    return table_ != nullptr ? VocabShard(0, rows, table_ + first)
                             : VocabShard(first_ + first, rows, nullptr);
  }

  std::int64_t rows() const { return rows_; }
  std::int64_t vocab_id(std::int64_t row) const {
    return table_ != nullptr ? table_[row] : first_ + row;
  }
  // Returns the row of an entry, or -1 if it belongs to another rank.
  std::int32_t row(std::int64_t vocab_id) const {
    if (table_ == nullptr) {
      const std::int64_t row = vocab_id - first_;
      return row >= 0 && row < rows_ ? static_cast<std::int32_t>(row) : -1;
    }
    const std::int32_t* const found = std::lower_bound(table_, table_ + rows_, vocab_id);
    return found != table_ + rows_ && *found == vocab_id ? static_cast<std::int32_t>(found - table_)
                                                         : -1;
  }

 private:
  std::int64_t rows_;
  std::int64_t first_ = 0;
  const std::int32_t* table_ = nullptr;  // [rows], ascending
};

}  // namespace logitless

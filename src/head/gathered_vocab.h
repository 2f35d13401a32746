// Weight-gathered heads: rows of the weight travel to the tokens of other ranks, one slice at a
// time. A slice has some rows of each rank or, for a weight sharded by columns, all ranks' columns
// of some rows. All ranks go through the same slices in the same order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/digest.h"
#include "head/plan_sizes.h"
#include "logitless/head_shape.h"

namespace logitless {

// Vocabulary shards of all ranks, as every rank knows them.
struct GatheredVocab {
  struct Of {
    std::int64_t first = 0;  // entry of row 0, if the entries are consecutive
    std::int64_t rows = 0;
  };
  std::vector<Of> ranks;              // sharded by columns: rank 0 has all entries, the others none
  std::vector<std::int64_t> columns;  // of each rank; empty if the weight is sharded by rows
  bool tables = false;                // the entries of some rank are not consecutive, so ids travel
                                      // with their rows

  std::int64_t most_rows() const;
  std::int64_t most_columns() const;  // 0 if the weight is sharded by rows
  // Calls f(rank, first column, column count) for each rank that has columns; never for a weight
  // sharded by rows.
  template <typename F>
  void each_columns(const F& f) const {
    std::int64_t first = 0;
    for (std::size_t r = 0; r < columns.size(); first += columns[r++])
      if (columns[r] > 0) f(static_cast<int>(r), first, columns[r]);
  }
};
GatheredVocab gathered_vocab(const std::vector<std::vector<VocabRun>>& vocab_of_ranks,
                             std::vector<std::int64_t> columns);

// Returns the most columns that a rank contributes to a slice.
inline std::int64_t slice_columns(const HeadShape& shape, const HeadFeatures& features) {
  return features.gathered_columns > 0 ? features.gathered_columns : shape.dim;
}
// Returns the number of kernel calls for a slice: one for the rows of each rank.
inline std::int64_t slice_blocks(const HeadFeatures& features) {
  return features.gathered_columns > 0 ? 1 : features.vocab_ranks;
}
// Returns whether the rows of all ranks in a slice are contiguous, so that one kernel call can take
// them. That requires that nothing else travels with them.
inline constexpr int kMostTogether = 64;
inline bool rows_lie_together(const HeadFeatures& features) {
  return features.gathered_columns == 0 && features.vocab_ranks <= kMostTogether &&
         !features.bias && !features.d_bias && !features.vocab_weight;
}

// Rows of a rank in a slice: local rows [first, first + count).
struct SliceRows {
  std::int64_t first = 0, count = 0;
};
inline std::int64_t slice_count(std::int64_t most_rows, std::int64_t slice_rows) {
  return (most_rows + slice_rows - 1) / slice_rows;
}
inline SliceRows rows_in_slice(std::int64_t slice, std::int64_t slice_rows, std::int64_t rows) {
  const std::int64_t first = slice * slice_rows;
  return {first, std::clamp<std::int64_t>(rows - first, 0, slice_rows)};
}

// Layout of one rank's contribution to a slice of B rows: weight [B, C] without gaps, then bias and
// ids, each aligned to 64 bytes. C is D for a weight sharded by rows. Sharded by columns, C is the
// rank's columns, and neither bias nor ids travel.
struct SliceLayout {
  std::size_t bias = 0;       // f32 [B], with a bias
  std::size_t vocab_ids = 0;  // i32 [B], with tables
  std::size_t bytes = 0;
};
SliceLayout slice_layout(const HeadShape& shape, const HeadFeatures& features,
                         std::int64_t slice_rows, bool tables);
// Layout of the gradient sums that a rank receives for a slice from another: d_weight f32 [B, C],
// then d_bias f32 [B].
struct SliceSums {
  std::size_t d_bias = 0;
  std::size_t bytes = 0;  // 0: neither is requested
};
SliceSums slice_sums(const HeadShape& shape, const HeadFeatures& features, std::int64_t slice_rows);
// Layouts of the additional buffers of a weight sharded by columns: the assembled slice, rows with
// all columns and their bias, and the sums of all columns and of d_bias. Empty for a weight sharded
// by rows.
SliceLayout full_slice(const HeadShape& shape, const HeadFeatures& features,
                       std::int64_t slice_rows);
SliceSums full_sums(const HeadShape& shape, const HeadFeatures& features, std::int64_t slice_rows);
// All four of them.
struct SliceParts {
  SliceLayout slice, whole;
  SliceSums sums, full_sums;
};
inline SliceParts slice_parts(const HeadShape& shape, const HeadFeatures& features,
                              std::int64_t slice_rows, bool tables) {
  return {slice_layout(shape, features, slice_rows, tables),
          full_slice(shape, features, slice_rows), slice_sums(shape, features, slice_rows),
          full_sums(shape, features, slice_rows)};
}

// Returns the candidate sizes of slices, the largest first: multiples of 256 rows, at most half of
// a rank's rows. A rank of at most 256 rows has one slice of all of them.
std::vector<std::int64_t> slice_sizes(std::int64_t most_rows);

}  // namespace logitless

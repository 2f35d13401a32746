// Words whose rows travel to the tokens of other ranks: a piece holds some rows of each rank or, of
// a weight by columns, all ranks' columns of some rows. All ranks go through the same pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/digest.h"
#include "head/plan_sizes.h"
#include "logitless/head_shape.h"

namespace logitless {

// What all ranks know of one another's words.
struct GatheredWords {
  struct Of {
    std::int64_t first = 0;  // word of row 0, where words follow one another
    std::int64_t rows = 0;
  };
  std::vector<Of> ranks;              // by columns the first has all words, and the others none
  std::vector<std::int64_t> columns;  // of each rank; empty: rows travel
  bool tables = false;                // of some rank they do not: words travel with their rows

  std::int64_t most_rows() const;
  std::int64_t most_columns() const;  // 0 where rows travel
  // f(rank, the first of its columns, how many) for the ranks that have some; none where rows
  // travel.
  template <typename F>
  void each_columns(const F& f) const {
    std::int64_t first = 0;
    for (std::size_t r = 0; r < columns.size(); first += columns[r++])
      if (columns[r] > 0) f(static_cast<int>(r), first, columns[r]);
  }
};
GatheredWords gathered_words(const std::vector<std::vector<WordRun>>& words_of_ranks,
                             std::vector<std::int64_t> columns);

// Columns of a rank's rows in a piece, where it has most.
inline std::int64_t piece_columns(const HeadShape& shape, const HeadFeatures& features) {
  return features.gathered_columns > 0 ? features.gathered_columns : shape.dim;
}
// Calls of the kernel for each piece: of each rank's rows.
inline std::int64_t piece_blocks(const HeadFeatures& features) {
  return features.gathered_columns > 0 ? 1 : features.word_ranks;
}
// Whether the rows of all ranks in a piece lie together, so that they can be one call: nothing else
// of them travels with them.
inline constexpr int kMostTogether = 64;
inline bool rows_lie_together(const HeadFeatures& features) {
  return features.gathered_columns == 0 && features.word_ranks <= kMostTogether && !features.bias &&
         !features.d_bias && !features.vocab_weight;
}

// Rows of a rank in a piece: [first, first + count) of its own.
struct PieceRows {
  std::int64_t first = 0, count = 0;
};
inline std::int64_t piece_count(std::int64_t most_rows, std::int64_t piece_rows) {
  return (most_rows + piece_rows - 1) / piece_rows;
}
inline PieceRows rows_in_piece(std::int64_t piece, std::int64_t piece_rows, std::int64_t rows) {
  const std::int64_t first = piece * piece_rows;
  return {first, std::clamp<std::int64_t>(rows - first, 0, piece_rows)};
}

// What one rank gives to a piece of B rows: [B, C] of the weight, of its C columns without gaps,
// then the rest, each part on a multiple of 64 bytes. C is D where rows travel; by columns no bias
// and no words travel.
struct PieceLayout {
  std::size_t bias = 0;   // f32 [B], with a bias
  std::size_t words = 0;  // i32 [B], with tables
  std::size_t bytes = 0;
};
PieceLayout piece_layout(const HeadShape& shape, const HeadFeatures& features,
                         std::int64_t piece_rows, bool tables);
// And what one rank gets of a piece from another: f32 [B, C] of d_weight, then f32 [B] of d_bias.
struct PieceSums {
  std::size_t d_bias = 0;
  std::size_t bytes = 0;  // 0: neither is wanted
};
PieceSums piece_sums(const HeadShape& shape, const HeadFeatures& features, std::int64_t piece_rows);
// By columns, beside both: a piece put together, rows with all columns and their bias; and the sums
// of all columns and of d_bias. Of no bytes where rows travel.
PieceLayout whole_piece(const HeadShape& shape, const HeadFeatures& features,
                        std::int64_t piece_rows);
PieceSums whole_sums(const HeadShape& shape, const HeadFeatures& features, std::int64_t piece_rows);

// The sizes of pieces worth a thought, the largest first: whole blocks of 256 rows, half of a
// rank's at most; all of them where they are no more than such a block.
std::vector<std::int64_t> piece_sizes(std::int64_t most_rows);

}  // namespace logitless

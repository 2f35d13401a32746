#include "head/gathered_words.h"

#include "kernels/cpu_head.h"

namespace logitless {
namespace {

constexpr std::int64_t kRowBlock = 256;  // multiple of rows for which the sums of lse have the same
                                         // bits

std::size_t aligned(std::int64_t bytes) { return static_cast<std::size_t>(round_up(bytes, 64)); }

}  // namespace

std::int64_t GatheredWords::most_rows() const {
  std::int64_t most = 1;
  for (const Of& rank : ranks) most = std::max(most, rank.rows);
  return most;
}

std::int64_t GatheredWords::most_columns() const {
  return columns.empty() ? 0 : *std::max_element(columns.begin(), columns.end());
}

GatheredWords gathered_words(const std::vector<std::vector<WordRun>>& words_of_ranks,
                             std::vector<std::int64_t> columns) {
  GatheredWords out;
  out.columns = std::move(columns);
  for (const std::vector<WordRun>& runs : words_of_ranks) {
    GatheredWords::Of& rank = out.ranks.emplace_back();
    if (!runs.empty()) rank.first = runs.front().first;
    for (const WordRun& run : runs) rank.rows += run.end - run.first;
    out.tables = out.tables || runs.size() > 1;
  }
  return out;
}

namespace {

PieceLayout layout_of(std::int64_t columns, DType dtype, bool bias, bool tables,
                      std::int64_t piece_rows) {
  PieceLayout out;
  out.bias = aligned(piece_rows * columns * static_cast<std::int64_t>(size_of(dtype)));
  out.words = out.bias + (bias ? aligned(piece_rows * 4) : 0);
  out.bytes = out.words + (tables ? aligned(piece_rows * 4) : 0);
  return out;
}

PieceSums sums_of(std::int64_t columns, const HeadFeatures& features, std::int64_t piece_rows) {
  PieceSums out;
  out.d_bias = features.d_weight ? aligned(piece_rows * columns * 4) : 0;
  out.bytes = out.d_bias + (features.d_bias ? aligned(piece_rows * 4) : 0);
  return out;
}

}  // namespace

PieceLayout piece_layout(const HeadShape& shape, const HeadFeatures& features,
                         std::int64_t piece_rows, bool tables) {
  const bool rows = features.gathered_columns == 0;
  return layout_of(piece_columns(shape, features), shape.dtype, rows && features.bias,
                   rows && tables, piece_rows);
}
PieceLayout whole_piece(const HeadShape& shape, const HeadFeatures& features,
                        std::int64_t piece_rows) {
  return features.gathered_columns == 0
             ? PieceLayout()
             : layout_of(shape.dim, shape.dtype, features.bias, false, piece_rows);
}

PieceSums piece_sums(const HeadShape& shape, const HeadFeatures& features,
                     std::int64_t piece_rows) {
  return sums_of(piece_columns(shape, features), features, piece_rows);
}
PieceSums whole_sums(const HeadShape& shape, const HeadFeatures& features,
                     std::int64_t piece_rows) {
  return features.gathered_columns == 0 ? PieceSums() : sums_of(shape.dim, features, piece_rows);
}

std::vector<std::int64_t> piece_sizes(std::int64_t most_rows) {
  if (most_rows <= kRowBlock) return {most_rows};
  std::vector<std::int64_t> sizes;
  for (std::int64_t count = 2;; count *= 2) {
    sizes.push_back(round_up(ceil_div(most_rows, count), kRowBlock));
    if (sizes.back() == kRowBlock) return sizes;
  }
}

}  // namespace logitless

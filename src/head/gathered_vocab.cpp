#include "head/gathered_vocab.h"

#include "kernels/cpu_head.h"

namespace logitless {
namespace {

constexpr std::int64_t kRowBlock = 256;  // multiple of rows for which the sums of lse have the same
                                         // bits

std::size_t aligned(std::int64_t bytes) { return static_cast<std::size_t>(round_up(bytes, 64)); }

}  // namespace

std::int64_t GatheredVocab::most_rows() const {
  std::int64_t most = 1;
  for (const Of& rank : ranks) most = std::max(most, rank.rows);
  return most;
}

std::int64_t GatheredVocab::most_columns() const {
  return columns.empty() ? 0 : *std::max_element(columns.begin(), columns.end());
}

GatheredVocab gathered_vocab(const std::vector<std::vector<VocabRun>>& vocab_of_ranks,
                             std::vector<std::int64_t> columns) {
  GatheredVocab out;
  out.columns = std::move(columns);
  for (const std::vector<VocabRun>& runs : vocab_of_ranks) {
    GatheredVocab::Of& rank = out.ranks.emplace_back();
    if (!runs.empty()) rank.first = runs.front().first;
    for (const VocabRun& run : runs) rank.rows += run.end - run.first;
    out.tables = out.tables || runs.size() > 1;
  }
  return out;
}

namespace {

SliceLayout layout_of(std::int64_t columns, DType dtype, bool bias, bool tables,
                      std::int64_t slice_rows) {
  SliceLayout out;
  out.bias = aligned(slice_rows * columns * static_cast<std::int64_t>(size_of(dtype)));
  out.vocab_ids = out.bias + (bias ? aligned(slice_rows * 4) : 0);
  out.bytes = out.vocab_ids + (tables ? aligned(slice_rows * 4) : 0);
  return out;
}

SliceSums sums_of(std::int64_t columns, const HeadFeatures& features, std::int64_t slice_rows) {
  SliceSums out;
  out.d_bias = features.d_weight ? aligned(slice_rows * columns * 4) : 0;
  out.bytes = out.d_bias + (features.d_bias ? aligned(slice_rows * 4) : 0);
  return out;
}

}  // namespace

SliceLayout slice_layout(const HeadShape& shape, const HeadFeatures& features,
                         std::int64_t slice_rows, bool tables) {
  const bool rows = features.gathered_columns == 0;
  return layout_of(slice_columns(shape, features), shape.dtype, rows && features.bias,
                   rows && tables, slice_rows);
}
SliceLayout full_slice(const HeadShape& shape, const HeadFeatures& features,
                       std::int64_t slice_rows) {
  return features.gathered_columns == 0
             ? SliceLayout()
             : layout_of(shape.dim, shape.dtype, features.bias, false, slice_rows);
}

SliceSums slice_sums(const HeadShape& shape, const HeadFeatures& features,
                     std::int64_t slice_rows) {
  return sums_of(slice_columns(shape, features), features, slice_rows);
}
SliceSums full_sums(const HeadShape& shape, const HeadFeatures& features, std::int64_t slice_rows) {
  return features.gathered_columns == 0 ? SliceSums() : sums_of(shape.dim, features, slice_rows);
}

std::vector<std::int64_t> slice_sizes(std::int64_t most_rows) {
  if (most_rows <= kRowBlock) return {most_rows};
  std::vector<std::int64_t> sizes;
  for (std::int64_t count = 2;; count *= 2) {
    sizes.push_back(round_up(ceil_div(most_rows, count), kRowBlock));
    if (sizes.back() == kRowBlock) return sizes;
  }
}

}  // namespace logitless

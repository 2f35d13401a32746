#include "train/rank_pieces.h"

#include <algorithm>

namespace logitless::train {
namespace {

constexpr std::size_t kUnit = 64;  // elements that no border of pieces cuts

std::size_t up_to(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Of the regions of a set.
int region_of(const ParameterUse& use) { return !use.master ? 0 : use.rounded ? 1 : 2; }
constexpr int kRegions = 3;

}  // namespace

RankPieces::RankPieces(const std::vector<std::size_t>& counts,
                       const std::vector<ParameterUse>& uses, int rank, int ranks,
                       std::size_t bucket)
    : rank_(rank), ranks_(ranks) {
  const auto group = static_cast<std::size_t>(ranks), mine = static_cast<std::size_t>(rank);
  const std::size_t most = std::max<std::size_t>(1, bucket / (group * kUnit)) * kUnit;
  layout_.counts = counts;
  layout_.offsets.resize(counts.size());
  for (int region = 0; region < kRegions; ++region) {
    const std::size_t begin = layout_.end;
    if (region == 1) {
      master_begin_ = begin;
      owned_before_masters_ = owned_;
    }
    ParameterUse use;
    for (std::size_t t = 0; t < counts.size(); ++t) {
      if (region_of(uses[t]) != region) continue;
      use = uses[t];
      layout_.offsets[t] = layout_.end;
      layout_.end = up_to(layout_.end + counts[t], TensorLayout::kAlign);
    }
    const std::size_t end = layout_.end;
    for (std::size_t at = begin; at < end; at += group * buckets_.back().piece) {
      const std::size_t left = up_to((end - at + group - 1) / group, kUnit);
      buckets_.push_back({at, ranks == 1 ? left : std::min(left, most), owned_, use});
      owned_ += buckets_.back().piece;
      layout_.end = std::max(layout_.end, at + group * buckets_.back().piece);
    }
    layout_.end = up_to(layout_.end, TensorLayout::kAlign);
    owned_ = up_to(owned_, TensorLayout::kAlign);
    if (region < 2) rounded_end_ = layout_.end;
  }
  for (const Bucket& b : buckets_) {
    const std::size_t first = b.begin + mine * b.piece, last = first + b.piece;
    for (std::size_t t = 0; t < counts.size(); ++t) {
      const std::size_t from = std::max(first, layout_.offsets[t]);
      const std::size_t to = std::min(last, layout_.offsets[t] + counts[t]);
      if (from < to)
        slices_.push_back({t, from - layout_.offsets[t], to - from, from, b.owned + from - first});
    }
  }
}

std::size_t RankPieces::longest_bucket() const {
  std::size_t longest = 0;
  for (const Bucket& b : buckets_)
    longest = std::max(longest, static_cast<std::size_t>(ranks_) * b.piece);
  return longest;
}

}  // namespace logitless::train

#include "train/ranks/rank_partition.h"

#include <algorithm>
#include <numeric>

#include "logitless/error.h"

namespace logitless::train {
namespace {

constexpr std::size_t kUnit = 64;  // slices begin at multiples of it, in elements

std::size_t up_to(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Returns the region of a set that tensors with this use lie in.
int region_of(const ParameterUse& use) { return !use.master ? 0 : use.rounded ? 1 : 2; }
constexpr int kRegions = 3;

}  // namespace

RankPartition::RankPartition(const std::vector<std::size_t>& counts,
                             const std::vector<ParameterUse>& uses, int rank, int ranks,
                             std::size_t bucket)
    : rank_(rank), ranks_(ranks) {
  const auto group = static_cast<std::size_t>(ranks);
  const auto is_own = [&](std::size_t t) { return ranks > 1 && uses[t].local_row > 0; };
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
      if (region_of(uses[t]) != region || is_own(t)) continue;
      use = uses[t];
      layout_.offsets[t] = layout_.end;
      layout_.end = up_to(layout_.end + counts[t], TensorLayout::kAlign);
    }
    const std::size_t end = layout_.end;
    for (std::size_t at = begin; at < end; at += group * buckets_.back().slice_size) {
      const std::size_t left = up_to((end - at + group - 1) / group, kUnit);
      const std::size_t slice_size = ranks == 1 ? left : std::min(left, most);
      buckets_.push_back({at, slice_size, slice_size, owned_, use});
      owned_ += buckets_.back().slice_size;
      layout_.end = std::max(layout_.end, at + group * buckets_.back().slice_size);
    }
    layout_.end = up_to(layout_.end, TensorLayout::kAlign);
    owned_ = up_to(owned_, TensorLayout::kAlign);
    if (region < 2) rounded_end_ = layout_.end;
  }
  shared_end_ = layout_.end;
  for (std::size_t t = 0; t < counts.size(); ++t) {
    if (is_own(t)) add_local_rows(t, uses[t], most);
  }
  add_slices(buckets_);
  add_slices(local_buckets_);
}

std::int64_t RankPartition::rows_of_each(std::int64_t rows, std::int64_t row, int ranks) {
  const std::int64_t unit = static_cast<std::int64_t>(kUnit) / std::gcd<std::int64_t>(kUnit, row);
  return ((rows + ranks - 1) / ranks + unit - 1) / unit * unit;
}

void RankPartition::add_local_rows(std::size_t tensor, const ParameterUse& use, std::size_t most) {
  if (local_rows_) throw InternalError("two tensors of which ranks have rows of their own");
  const auto group = static_cast<std::size_t>(ranks_), mine = static_cast<std::size_t>(rank_);
  const std::size_t rows = layout_.counts[tensor] / use.local_row;
  const auto each = static_cast<std::size_t>(rows_of_each(
      static_cast<std::int64_t>(rows), static_cast<std::int64_t>(use.local_row), ranks_));
  const std::size_t first = std::min(rows, mine * each);
  local_rows_ = {tensor, static_cast<std::int64_t>(first),
                 static_cast<std::int64_t>(std::min(rows - first, each)),
                 static_cast<std::int64_t>(each)};
  local_stride_ = each * use.local_row;
  local_rounded_ = use.rounded;
  layout_.offsets[tensor] = shared_end_;
  for (std::size_t at = 0; at < local_stride_; at += local_buckets_.back().slice_size) {
    local_buckets_.push_back(
        {shared_end_ + at, std::min(most, local_stride_ - at), local_stride_, owned_, use});
    owned_ += local_buckets_.back().slice_size;
  }
  layout_.end = up_to(shared_end_ + group * local_stride_, TensorLayout::kAlign);
  owned_ = up_to(owned_, TensorLayout::kAlign);
}

void RankPartition::add_slices(const std::vector<Bucket>& buckets) {
  const auto mine = static_cast<std::size_t>(rank_);
  for (const Bucket& b : buckets) {
    const std::size_t first = b.begin + mine * b.stride, last = first + b.slice_size;
    for (std::size_t t = 0; t < layout_.counts.size(); ++t) {
      const std::size_t from = std::max(first, layout_.offsets[t]);
      const std::size_t to = std::min(last, layout_.offsets[t] + layout_.counts[t]);
      if (from < to)
        slices_.push_back({t, from - layout_.offsets[t], to - from, from, b.owned + from - first});
    }
  }
}

std::size_t RankPartition::longest_bucket() const {
  std::size_t longest = 0;
  for (const auto* buckets : {&buckets_, &local_buckets_}) {
    for (const Bucket& b : *buckets)
      longest = std::max(longest, static_cast<std::size_t>(ranks_) * b.slice_size);
  }
  return longest;
}

}  // namespace logitless::train

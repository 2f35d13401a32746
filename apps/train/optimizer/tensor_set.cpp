#include "train/optimizer/tensor_set.h"

#include <cstring>
#include <utility>

namespace logitless::train {

std::vector<std::size_t> counts_of(const std::vector<Parameter>& list) {
  std::vector<std::size_t> counts;
  for (const Parameter& parameter : list)
    counts.push_back(static_cast<std::size_t>(parameter.numel()));
  return counts;
}

TensorLayout::TensorLayout(const std::vector<Parameter>& list) : counts(counts_of(list)) {
  for (const std::size_t count : counts) {
    offsets.push_back(end);
    end += (count + kAlign - 1) / kAlign * kAlign;
  }
}

TensorSet::TensorSet(TensorLayout layout) : layout_(std::move(layout)) {
  if (layout_.end == 0) return;
  memory_ = Buffer(layout_.end * sizeof(float));
  std::memset(memory_.data(), 0, memory_.bytes());
}

std::span<float> TensorSet::operator[](std::size_t index) const {
  return all().subspan(layout_.offsets[index], layout_.counts[index]);
}

}  // namespace logitless::train

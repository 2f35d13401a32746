#include "train/tensor_set.h"

#include <cstring>

namespace logitless::train {

TensorSet::TensorSet(const std::vector<Parameter>& list) {
  constexpr std::size_t kAlign = 64 / sizeof(float);
  offsets_.push_back(0);
  for (const Parameter& parameter : list) {
    counts_.push_back(static_cast<std::size_t>(parameter.numel()));
    offsets_.push_back(offsets_.back() + (counts_.back() + kAlign - 1) / kAlign * kAlign);
  }
  memory_ = Buffer(offsets_.back() * sizeof(float));
  std::memset(memory_.data(), 0, memory_.bytes());
}

std::span<float> TensorSet::operator[](std::size_t index) const {
  return {memory_.as<float>() + offsets_[index], counts_[index]};
}

}  // namespace logitless::train

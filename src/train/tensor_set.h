// One f32 tensor for each parameter of a model: values, gradients, moments.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "logitless/memory.h"
#include "train/model.h"

namespace logitless::train {

class TensorSet {
 public:
  // Zeros. Throws DeviceError when memory is short.
  explicit TensorSet(const std::vector<Parameter>& list);

  std::size_t size() const { return offsets_.size() - 1; }
  // Aligned to 64 bytes.
  std::span<float> operator[](std::size_t index) const;
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  std::vector<std::size_t> offsets_;  // in floats
  std::vector<std::size_t> counts_;
  Buffer memory_;
};

}  // namespace logitless::train

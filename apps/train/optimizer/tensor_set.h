// One f32 tensor for each parameter of a model: values, gradients, moments.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "logitless/memory.h"
#include "train/model/model.h"

namespace logitless::train {

// Layout of the tensors of a set: offsets and counts in elements.
struct TensorLayout {
  static constexpr std::size_t kAlign = 128;  // of offsets: 256 bytes in the shortest dtype

  TensorLayout() = default;
  explicit TensorLayout(const std::vector<Parameter>& list);

  std::vector<std::size_t> offsets, counts;
  std::size_t end = 0;
};
std::vector<std::size_t> counts_of(const std::vector<Parameter>& list);

class TensorSet {
 public:
  TensorSet() = default;
  // Allocates zeros. Throws DeviceError when memory is short.
  explicit TensorSet(TensorLayout layout);
  explicit TensorSet(const std::vector<Parameter>& list) : TensorSet(TensorLayout(list)) {}

  std::size_t size() const { return layout_.counts.size(); }
  // Returns a tensor, aligned to 64 bytes.
  std::span<float> operator[](std::size_t index) const;
  // Returns the whole layout, padding included.
  std::span<float> all() const { return {memory_.as<float>(), layout_.end}; }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  TensorLayout layout_;
  Buffer memory_;
};

}  // namespace logitless::train

// Tensors for tests of files: random bytes of any dtype and shape, and their elements one by one.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "logitless/memory.h"
#include "logitless/tensor_file.h"

namespace logitless {

// A contiguous tensor of random bits: files keep NaN and subnormal numbers unchanged.
class RandomTensor {
 public:
  RandomTensor(DType dtype, std::vector<std::int64_t> shape, unsigned seed)
      : dtype_(dtype), shape_(std::move(shape)) {
    const auto bytes = static_cast<std::size_t>(ConstTensorView(nullptr, dtype_, shape_).bytes());
    storage_ = Buffer(bytes);
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < bytes; ++i)
      storage_.as<unsigned char>()[i] = static_cast<unsigned char>(random());
  }

  ConstTensorView view() const { return {storage_.data(), dtype_, shape_}; }

 private:
  DType dtype_;
  std::vector<std::int64_t> shape_;
  Buffer storage_;
};

inline std::vector<std::int64_t> shape_of(const ConstTensorView& view) {
  std::vector<std::int64_t> shape;
  for (int d = 0; d < view.rank(); ++d) shape.push_back(view.size(d));
  return shape;
}

// Returns the bytes of the elements, last dimension fastest, by separate index arithmetic.
inline std::string elements_of(const ConstTensorView& view) {
  const auto item = static_cast<std::int64_t>(size_of(view.dtype()));
  std::string bytes;
  bytes.reserve(static_cast<std::size_t>(view.bytes()));
  for (std::int64_t flat = 0; flat < view.numel(); ++flat) {
    std::int64_t rest = flat;
    std::int64_t offset = 0;
    for (int d = view.rank() - 1; d >= 0; --d) {
      offset += rest % view.size(d) * view.stride(d);
      rest /= view.size(d);
    }
    bytes.append(static_cast<const char*>(view.data()) + offset * item,
                 static_cast<std::size_t>(item));
  }
  return bytes;
}

// Returns dtype, shape and bytes as text for EXPECT_EQ.
inline std::string content_of(const ConstTensorView& view) {
  std::string text = std::string(name_of(view.dtype())) + "[";
  for (const std::int64_t size : shape_of(view)) text += std::to_string(size) + " ";
  return text + "] " + elements_of(view);
}

}  // namespace logitless

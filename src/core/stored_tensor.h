// A tensor file's descriptions of its tensors, before any of their bytes are read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/dtype.h"

namespace logitless {

// Parsers guarantee begin <= end <= bytes in the file. Where `dtype` is set, end - begin is exactly
// the bytes of the shape. Its sizes are not negative, and their product, zeros left out, fits 63
// bits.
struct StoredTensor {
  std::string name;
  std::string dtype_text;      // as the file spells it
  std::optional<DType> dtype;  // empty: a type that the library does not compute with
  std::vector<std::int64_t> shape;
  std::size_t begin = 0;  // offsets into the file
  std::size_t end = 0;
};

struct TensorIndex {
  std::vector<StoredTensor> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

// Quotes text from a file for a message: control bytes become ?, and it is cut after 80 bytes
// between characters.
inline std::string quoted_text(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  std::size_t length = std::min(text.size(), kLongest);
  while (length > 0 && length < text.size() && (text[length] & 0xc0) == 0x80) --length;
  std::string result = "'";
  for (const char c : text.substr(0, length)) {
    result += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return result + (length < text.size() ? "...'" : "'");
}

// Returns the number of elements of `shape`, none negative; 0 when any is zero. Empty when the
// product, zeros left out, exceeds 2^60 - 1. Strides and bytes could then overflow, even for a
// tensor without elements.
inline std::optional<std::int64_t> checked_numel(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, size, &product) || product > INT64_MAX / 8) {
      return std::nullopt;
    }
  }
  return empty ? 0 : product;
}

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t d = 0; d < shape.size() && d < 8; ++d)
    text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + (shape.size() > 8 ? ", ...]" : "]");
}

}  // namespace logitless

// Memory range of a view's elements.
#pragma once

#include <cstdint>
#include <optional>

#include "logitless/tensor_view.h"

namespace logitless {

struct ByteRange {
  std::uintptr_t begin = 0, end = 0;

  bool empty() const { return begin == end; }
  bool meets(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

// Returns the range from the lowest byte of an element to the end of the highest; empty for a view
// without elements. Returns nothing when byte offsets exceed 64 bits, or addresses wrap.
std::optional<ByteRange> byte_range(const ConstTensorView& view);

}  // namespace logitless

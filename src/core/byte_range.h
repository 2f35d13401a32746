// Where in memory the elements of a view lie.
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

// From the lowest byte of an element to behind the highest; empty for a view without elements. None
// when offsets in bytes are not of 64 bits, or addresses wrap.
std::optional<ByteRange> byte_range(const ConstTensorView& view);

}  // namespace logitless

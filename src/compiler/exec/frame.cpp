#include "compiler/exec/frame.h"

#include <cstdint>

namespace logitless::ir {

std::byte* Frame::address(int buffer) const {
  const Buffer& b = program.buffers[static_cast<std::size_t>(buffer)];
  if (b.place == Place::arena) {
    if (b.inside < 0) return arena + b.offset;
    const auto result = reinterpret_cast<std::uintptr_t>(address(b.inside));
    const auto alignment = static_cast<std::uintptr_t>(program.alignment);
    return reinterpret_cast<std::byte*>((result + alignment - 1) / alignment * alignment) +
           b.offset;
  }
  const auto slot = static_cast<std::size_t>(b.slot);
  if (loop != nullptr) {
    const LoopRun::Slice& s = loop->slices[slot];
    return outer->address(s.outer) + s.offset + first * s.step;
  }
  const void* given =
      slot < parameters.size() ? parameters[slot] : results[slot - parameters.size()];
  return static_cast<std::byte*>(const_cast<void*>(given));  // parameters are only read
}

}  // namespace logitless::ir

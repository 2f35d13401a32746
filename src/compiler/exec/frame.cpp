#include "compiler/exec/frame.h"

namespace logitless::ir {

std::byte* Frame::address(int buffer) const {
  const Buffer& b = program.buffers[static_cast<std::size_t>(buffer)];
  if (b.place == Place::arena) return arena + b.offset;
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

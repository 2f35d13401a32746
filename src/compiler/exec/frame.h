// Where the buffers of a running program are: found from the arena and the caller's pointers, one
// frame for the program and one for each loop that it is in.
#pragma once

#include <cstddef>
#include <span>

#include "compiler/plan/program.h"

namespace logitless::ir {

struct Frame {
  const Program& program;
  std::byte* arena;
  // Of a whole program.
  std::span<const void* const> parameters = {};
  std::span<void* const> results = {};
  // Of a loop's body: the loop, the frame it runs in, and its argument.
  const LoopRun* loop = nullptr;
  const Frame* outer = nullptr;
  std::int64_t first = 0;

  std::byte* address(int buffer) const;
  std::byte* address(const View& view) const {
    return address(view.buffer) + view.offset * static_cast<std::int64_t>(size_of(view.dtype));
  }
};

}  // namespace logitless::ir

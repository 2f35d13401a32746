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

// f(a, b, c) with the addresses of each product that a batch kernel takes at once: of the outer
// dimensions all but the innermost are gone through.
template <typename F>
void for_each_batch(const Gemm& g, const Frame& frame, const F& f) {
  const std::size_t outer = g.outer.empty() ? 0 : g.outer.size() - 1;
  std::int64_t rounds = 1;
  for (std::size_t d = 0; d < outer; ++d) rounds *= g.outer[d];
  for (std::int64_t r = 0; r < rounds; ++r) {
    const auto at = [&](const View& v) {
      std::int64_t offset = 0, rest = r;
      for (std::size_t d = outer; d-- > 0;) {
        offset += rest % g.outer[d] * v.strides[d];
        rest /= g.outer[d];
      }
      return frame.address(v) + offset * static_cast<std::int64_t>(size_of(v.dtype));
    };
    f(at(g.a), at(g.b), at(g.c));
  }
}

}  // namespace logitless::ir

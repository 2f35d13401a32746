// Maps the buffers of a running program to addresses in the arena and in the caller's memory. A
// program has one frame, and so has each enclosing loop.
#pragma once

#include <cstddef>
#include <span>

#include "compiler/plan/program.h"

namespace logitless::ir {

struct Frame {
  const Program& program;
  std::byte* arena;
  // Set for a full program.
  std::span<const void* const> parameters = {};
  std::span<void* const> results = {};
  // Set for a loop's body: the loop, the frame around it, and the loop's argument.
  const LoopRun* loop = nullptr;
  const Frame* outer = nullptr;
  std::int64_t first = 0;

  std::byte* address(int buffer) const;
  std::byte* address(const View& view) const {
    return address(view.buffer) + view.offset * static_cast<std::int64_t>(size_of(view.dtype));
  }
};

// Calls f(a, b, c) with the addresses of each batch of matrix products that one kernel call
// computes. Iterates over all outer dimensions but the innermost.
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

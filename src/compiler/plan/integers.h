// Integers in registers of exact loops, alike on CPUs and GPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "compiler/plan/program.h"
#include "logitless/dtype.h"

namespace logitless::ir {

// Returns whether a register holds an integer: an i32 or i64 of an exact loop. Truths and constants
// are floats.
inline bool holds_integers(const Pointwise& loop, int reg) {
  if (!loop.exact || reg < 0) return false;
  const auto leaves = loop.leaves.size();
  const auto at = static_cast<std::size_t>(reg);
  if (at >= leaves) return is_index(loop.steps[at - leaves].dtype);
  const Pointwise::Leaf& leaf = loop.leaves[at];
  return leaf.kind == Pointwise::Leaf::Kind::memory ? is_index(leaf.view.dtype)
                                                    : leaf.kind != Pointwise::Leaf::Kind::constant;
}

// Returns 2^31 or 2^63: integers of the dtype are below it, and not below its negative.
inline double most_of(DType dtype) { return dtype == DType::i32 ? 0x1p31 : 0x1p63; }

// Truncates toward 0. Gives the least integer of the dtype where the value does not fit.
inline std::int64_t integer_of(double x, DType dtype) {
  const double most = most_of(dtype);
  return static_cast<std::int64_t>(x >= -most && x < most ? x : -most);
}

inline std::int64_t wrapped(std::uint64_t x, DType dtype) {
  return dtype == DType::i32 ? static_cast<std::int32_t>(x) : static_cast<std::int64_t>(x);
}

}  // namespace logitless::ir

// Targets of tokens.
#pragma once

#include "kernels/device_head.h"

namespace logitless::cuda {

// The target of a slot [tokens, K] of a chunk; ignore_index where the row has none.
__device__ __forceinline__ std::int64_t target_of(const ForwardCall& c, std::int64_t slot) {
  slot += c.first_token * c.shape.targets_per_token;
  if (c.sequence > 0) {  // K = 1
    if (slot % c.sequence == c.sequence - 1) return c.ignore_index;
    ++slot;
  }
  return c.wide_targets ? static_cast<const std::int64_t*>(c.targets)[slot]
                        : static_cast<const std::int32_t*>(c.targets)[slot];
}
__device__ __forceinline__ bool is_word(const ForwardCall& c, std::int64_t word) {
  return word >= 0 && word < c.shape.vocab && word != c.ignore_index;
}
// Whether a token has a target.
__device__ __forceinline__ bool counts(const ForwardCall& c, std::int64_t row) {
  const int per_token = c.shape.targets_per_token;
  for (int k = 0; k < per_token; ++k)
    if (is_word(c, target_of(c, row * per_token + k))) return true;
  return false;
}

}  // namespace logitless::cuda

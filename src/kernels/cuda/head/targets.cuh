// Lookup of tokens' targets, and outputs that all forward kernels write alike.
#pragma once

#include "kernels/device/head.h"

namespace logitless::cuda {

// Index of a chunk's row among all tokens of the call.
__device__ __forceinline__ std::int64_t token_of(const ForwardCall& c, std::int64_t row) {
  row += c.first_token;
  return c.rows == nullptr ? row : c.rows[row];
}
// Index of a chunk's slot [tokens, K] among the call's targets.
__device__ __forceinline__ std::int64_t place_of(const ForwardCall& c, std::int64_t slot) {
  const int per_token = c.shape.targets_per_token;
  if (c.rows == nullptr) return slot + c.first_token * per_token;
  return token_of(c, slot / per_token) * per_token + slot % per_token;
}

// Target of a slot [tokens, K] of a chunk; ignore_index where the row has none.
__device__ __forceinline__ std::int64_t target_of(const ForwardCall& c, std::int64_t slot) {
  slot = place_of(c, slot);
  if (c.sequence > 0) {  // K = 1
    if (slot % c.sequence == c.sequence - 1) return c.ignore_index;
    ++slot;
  }
  return c.int64_targets ? static_cast<const std::int64_t*>(c.targets)[slot]
                         : static_cast<const std::int32_t*>(c.targets)[slot];
}
// Returns true if it is a target: an id of the global vocabulary, whichever shard has its row.
__device__ __forceinline__ bool is_target(const ForwardCall& c, std::int64_t vocab_id) {
  return vocab_id >= 0 && vocab_id < c.vocab_of_targets() && vocab_id != c.ignore_index;
}
// Returns true if it is neither a target nor ignore_index.
__device__ __forceinline__ bool is_bad(const ForwardCall& c, std::int64_t vocab_id) {
  return vocab_id != c.ignore_index && !is_target(c, vocab_id);
}
// Log-probability of a target without a local logit: 0, or NaN where the target is bad.
__device__ __forceinline__ float without_logit(const ForwardCall& c, std::int64_t vocab_id) {
  return is_bad(c, vocab_id) ? nanf("") : 0.0f;
}
// Local row of weight of a token id; outside [0, vocab) if the shard has none.
__device__ __forceinline__ std::int64_t row_of_vocab_id(const ForwardCall& c,
                                                        std::int64_t vocab_id) {
  if (c.vocab_ids == nullptr) return vocab_id - c.vocab_begin;
  std::int64_t first = 0, end = c.shape.vocab;
  while (first < end) {
    const std::int64_t middle = (first + end) / 2;
    if (c.vocab_ids[middle] < vocab_id) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  return first < c.shape.vocab && c.vocab_ids[first] == vocab_id ? first : -1;
}
__device__ __forceinline__ std::int32_t vocab_id_of_row(const ForwardCall& c, std::int32_t row) {
  return c.vocab_ids != nullptr ? c.vocab_ids[row] : static_cast<std::int32_t>(c.vocab_begin) + row;
}
// Returns true if it is a target with a local row of weight.
__device__ __forceinline__ bool is_local(const ForwardCall& c, std::int64_t vocab_id) {
  const std::int64_t row = row_of_vocab_id(c, vocab_id);
  return is_target(c, vocab_id) && row >= 0 && row < c.shape.vocab;
}
__device__ __forceinline__ void write_lse(const ForwardCall& c, std::int64_t row, double lse) {
  const auto rounded = static_cast<float>(lse);
  if (c.lse != nullptr) c.lse[row] = rounded;
  if (c.lse_rest != nullptr)
    c.lse_rest[row] = isfinite(rounded) ? static_cast<float>(lse - rounded) : 0.0f;
}
// Returns true if a token has a target.
__device__ __forceinline__ bool has_target(const ForwardCall& c, std::int64_t row) {
  const int per_token = c.shape.targets_per_token;
  for (int k = 0; k < per_token; ++k)
    if (is_target(c, target_of(c, row * per_token + k))) return true;
  return false;
}

}  // namespace logitless::cuda

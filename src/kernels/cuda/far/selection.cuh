// Selection of the far field's tiles: arguments, and the threshold of a token.
#pragma once

#include "kernels/device/far.h"

namespace logitless::cuda {

__device__ __forceinline__ bool has_bit(const std::uint32_t* bits, int at) {
  return (bits[at / 32] >> (at % 32) & 1u) != 0;
}

struct SelectArguments {
  const float* mass;  // [2 groups][padded tokens]
  const float* reference;
  const RowCoefficients* rows;  // null: selects by estimates, with
  const float* total;           // log2 of their sum; -inf for tokens without a target
  const float* caution;
  std::int32_t* order;          // [groups] FarArrangement::groups
  std::uint32_t* block_groups;  // [blocks][far_bits(groups)]
  std::uint32_t* group_blocks;  // [groups][far_bits(blocks)]
  std::uint32_t* list;
  std::int32_t* list_begin;
  FarSums* sums;
  std::int64_t tokens;
  std::int64_t padded_tokens;
  int tiles;
  int groups;
  int blocks;
  int group_bits;  // 32-bit words of the groups of a block
  int block_bits;  // 32-bit words of the blocks of a group
  float tau;
  float most_selected;
  bool reports_fallback;
  bool chosen;  // already selected: only the sample is added
  FarSample sample;
  // [blocks]: 0: all tokens of the block are ignored; it selects nothing, and has no logits.
  const int* active;
};

// Arguments of a chunk for estimates; set `rows` afterwards for exact masses.
SelectArguments select_arguments(const ForwardCall& call);

// A token selects tiles with more than this mass; infinite: none, likewise for a NaN.
__device__ __forceinline__ float least_mass(const SelectArguments& a, std::int64_t token) {
  if (token >= a.tokens) return INFINITY;
  if (a.rows == nullptr) {
    return a.total[token] > -INFINITY ? a.tau * exp2f(a.total[token] - a.reference[token])
                                      : INFINITY;
  }
  return a.rows[token].alpha != 0.0f ? a.tau * exp2f(a.rows[token].lse_log2 - a.reference[token])
                                     : INFINITY;
}
__device__ __forceinline__ float mass_of(const SelectArguments& a, int tile, std::int64_t token) {
  const float mass = a.mass[tile * a.padded_tokens + token];
  return a.rows == nullptr ? mass * exp2f(a.caution[tile]) : mass;
}

}  // namespace logitless::cuda

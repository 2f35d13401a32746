// Merge of one token's statistics over the ranks of a sharded vocabulary. Every rank merges the
// same records in the order of ranks, in double, and rounds once: all get the same bits.
//
//   exponent e = max_r e_r      S = sum_r s_r 2^(e_r - e)      lse = ln 2 (e + log2 S)
//   H = ln 2 (log2 S - sum_r (E_r + (e_r - e) s_r) 2^(e_r - e) / S)
//   sum_j w_j z_j = sum_r m_r
//
// Scaling is exact, since exponents are integral. This is the merge of online softmax (Milakov and
// Gimelshein, 2018), also in TransformerEngine's parallel cross entropy after one all-gather. The
// logit of a target is copied from the rank of its shard, and never summed.
#pragma once

#include <cmath>
#include <cstdint>

#include "math/exact_sum.h"
#include "math/host_device.h"
#include "math/lse_state.h"

namespace logitless {

// Statistics of one rank's vocabulary shard; the default is that of an empty one.
struct ShardState {
  float exponent = 0.0f;              // e_r, integral
  float sum = 0.0f;                   // s_r: sum_j 2^(z_j log2e - e_r)
  double entropy = 0.0;               // E_r: sum_j x_j log2 x_j of x_j = 2^(z_j log2e - e_r)
  double weighted = 0.0;              // m_r: sum_j w_j z_j
  float best = -INFINITY;             // largest logit
  std::int32_t vocab_id = INT32_MAX;  // its global vocabulary id, the lowest of equal ones
};

// A rank's record of a token. `wide` is the sum that lse is computed from: the same bits for any
// number of ranks.
struct TokenRecord {
  ExactSum wide;
  ShardState state;
};

// The logit of a target on one rank.
struct ShardTarget {
  float logit = 0.0f;
  std::int32_t is_local = 0;  // 1 only on the rank of its shard
};

// Merges two parts of the vocabulary, on any number of ranks; `sum` only shows whether there is
// any.
LOGITLESS_HOST_DEVICE inline void merge_into(ShardState& all, const ShardState& part) {
  if (part.sum != 0.0f) {
    const float top = all.sum == 0.0f ? part.exponent : fmaxf(all.exponent, part.exponent);
    const double before = all.sum == 0.0f ? 0.0 : exp2(static_cast<double>(all.exponent) - top);
    const double factor = exp2(static_cast<double>(part.exponent) - top);
    if (before != 0.0)
      all.entropy = entropy_against(top, all.exponent, all.sum, all.entropy) * before;
    if (factor != 0.0)
      all.entropy += entropy_against(top, part.exponent, part.sum, part.entropy) * factor;
    all.sum = static_cast<float>(all.sum * before + part.sum * factor);
    all.exponent = top;
  }
  all.weighted += part.weighted;
  if (part.best > all.best || (part.best == all.best && part.vocab_id < all.vocab_id)) {
    all.best = part.best;
    all.vocab_id = part.vocab_id;
  }
}

// Statistics of the global vocabulary.
struct MergedState {
  double exponent = 0.0;
  double sum = 0.0;
  double entropy = 0.0;  // sum_j x_j log2 x_j of x_j = 2^(z_j log2e - exponent)
  double weighted = 0.0;
  float best = -INFINITY;
  std::int32_t vocab_id = INT32_MAX;

  // -inf where all entries are masked.
  LOGITLESS_HOST_DEVICE double lse() const { return (exponent + log2(sum)) * kLn2; }
};

// Returns log2 sum_r 2^(of(r)) of the ranks' totals, in their order.
template <typename Of>
LOGITLESS_HOST_DEVICE float log2_of_sum(int ranks, const Of& of) {
  float top = -INFINITY;
  for (int r = 0; r < ranks; ++r) top = of(r) > top ? of(r) : top;
  double sum = 0.0;
  for (int r = 0; r < ranks; ++r)
    sum += of(r) == top ? 1.0 : exp2(static_cast<double>(of(r)) - static_cast<double>(top));
  return top == -INFINITY && sum == ranks ? top : top + static_cast<float>(log2(sum));
}

// Merges the ShardState state(r) of each rank r.
template <typename State>
LOGITLESS_HOST_DEVICE MergedState merge_shards(int ranks, const State& state) {
  MergedState all;
  bool any = false;
  for (int r = 0; r < ranks; ++r) {
    const ShardState& s = state(r);
    if (s.sum == 0.0f) continue;
    all.exponent = any ? fmax(all.exponent, static_cast<double>(s.exponent)) : s.exponent;
    any = true;
  }
  for (int r = 0; r < ranks; ++r) {
    const ShardState& s = state(r);
    if (s.sum != 0.0f) {
      const double factor = exp2(s.exponent - all.exponent);
      all.sum += s.sum * factor;
      if (factor != 0.0)
        all.entropy += entropy_against(all.exponent, s.exponent, s.sum, s.entropy) * factor;
    }
    all.weighted += s.weighted;
    if (s.best > all.best || (s.best == all.best && s.vocab_id < all.vocab_id)) {
      all.best = s.best;
      all.vocab_id = s.vocab_id;
    }
  }
  return all;
}

}  // namespace logitless

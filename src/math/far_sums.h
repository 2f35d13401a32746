// Sums of a far-field call, over its chunks; on a GPU they lie in its memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "math/host_device.h"

namespace logitless {

// Of the pairs that a call of far_both samples, whose masses are estimated and then computed: over
// their tokens that have a gradient, in parts of a token's total.
struct FarSampled {
  double tokens;
  double error_squared;  // exact mass less the estimate
  double most;           // the largest exact mass; NaN where one is

  LOGITLESS_HOST_DEVICE void add(const FarSampled& other) {
    tokens += other.tokens;
    error_squared += other.error_squared;
    if (other.most > most || std::isnan(other.most)) most = other.most;
  }
};

struct FarSums {
  std::int64_t kept;      // pairs of tiles (on a GPU groups of them) and blocks of tokens
  std::int64_t sampled;   // others, of FarSample
  std::int64_t pairs;     // all of blocks with a token that counts
  std::int64_t fallback;  // chunks that kept everything
  double bound_squared;
  double norm_squared;
  // How many tokens each of those audited stands for; 0: one.
  double audit_share;
  // Of the tokens audited: |far - exact|^2 and |exact|^2 of d_hidden, and of lse.
  std::int64_t audited;
  double audit_error_squared;
  double audit_norm_squared;
  double lse_error_squared;
  double lse_error_max;
  FarSampled of_sample;
};

}  // namespace logitless

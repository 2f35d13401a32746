// Sums of a far-field call over its chunks; on a GPU they are in device memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "math/host_device.h"

namespace logitless {

// Sums over the sampled pairs of a far_both call, whose masses are both estimated and computed.
// They cover tokens with a gradient; masses are fractions of a token's total.
struct FarSampled {
  double tokens;
  double error_squared;  // exact mass minus the estimate
  double most;           // largest exact mass; NaN where one is

  LOGITLESS_HOST_DEVICE void add(const FarSampled& other) {
    tokens += other.tokens;
    error_squared += other.error_squared;
    if (other.most > most || std::isnan(other.most)) most = other.most;
  }
};

struct FarSums {
  std::int64_t selected;  // selected pairs of tiles (on a GPU groups of them) and blocks of tokens
  std::int64_t sampled;   // skipped pairs sampled by FarSample
  std::int64_t pairs;     // all pairs of blocks with a token that counts
  std::int64_t fallback;  // chunks that selected everything
  double bound_squared;
  double norm_squared;
  // Tokens that each audited one stands for; 0: one.
  double audit_share;
  // Errors of the audited tokens: |far - exact|^2 and |exact|^2 of d_hidden, and of lse.
  std::int64_t audited;
  double audit_error_squared;
  double audit_norm_squared;
  double lse_error_squared;
  double lse_error_max;
  FarSampled of_sample;
};

}  // namespace logitless

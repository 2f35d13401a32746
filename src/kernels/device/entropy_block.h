// Saved exponentials with a gradient through the entropy. dz_j = p_j (alpha + beta (z_j - lse)) is
// no multiple of p_j then, but the exponential e still has its logit: z log2e = log2 e + reference.
// One pass over the block multiplies each exponential in place:
//
//   e -> e (alpha + beta (z - lse)) / size, with size a power of two of each token
//
// The block's factor is size 2^(reference - lse log2e) instead of alpha 2^(reference - lse log2e).
// A softcap's slope is part of the saved number, which then has no inverse: such heads recompute.
//
// A rounded exponential has a logit that is 2^-9 off (2^-12 in f16), so dz has an error of up to
// 2^-9 |beta| p beside its own rounding. That is much where p is near 1 and z - lse near 0. So the
// few entries of a token with much of its probability get their logit from hidden and weight again.
#pragma once

#include <cmath>

#include "kernels/device/gradient.h"

namespace logitless::cuda {

// Returns the size of a token's coefficients: elements of its block are then at most about the sum
// of its exponentials, which f16 holds. A token without a part of the entropy keeps its
// exponentials, and has alpha.
LOGITLESS_HOST_DEVICE inline float coefficient_size(const RowCoefficients& r) {
  if (r.beta == 0.0f) return r.alpha;
  const float most = fmaxf(fabsf(r.alpha), fabsf(r.beta));
  constexpr float kMost = 0x1p125f;
  constexpr float kLeast = 0x1p-125f;
  if (!(most < kMost)) return kMost;
  if (most < kLeast) return kLeast;
  return ldexpf(1.0f, ilogbf(most) + 1);
}

// Changes a block of exponentials as above, for the tokens with a part of the entropy. Called
// before prepare_block, which zeroes the targets. Only without a softcap.
void scale_by_logits(const BlockCall& call);

}  // namespace logitless::cuda

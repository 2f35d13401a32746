// The log-probability of a vocabulary entry.
#pragma once

#include <cmath>

#include "math/host_device.h"

namespace logitless {

// Returns z - lse. Where an entry has all of the probability, rounding of z and lse may leave a
// value slightly above 0: returns 0 then. Larger positive values come from logits out of range and
// are returned unchanged. Tokens with a logit of +inf have no probabilities: returns NaN.
LOGITLESS_HOST_DEVICE inline double log_prob_of(double z, double lse) {
  if (lse == INFINITY) return NAN;
  const double found = z - lse;
  const double rounding = 1e-5 * (1.0 + (lse < 0.0 ? -lse : lse));
  return found > 0.0 && found < rounding ? 0.0 : found;
}

}  // namespace logitless

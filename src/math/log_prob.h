// The log-probability of a word.
#pragma once

#include "math/host_device.h"

namespace logitless {

// z - lse, and no more than 0: of a word that has all of the probability the rounding of z and lse
// may leave it above. NaN stays.
LOGITLESS_HOST_DEVICE inline double log_prob_of(double z, double lse) {
  const double found = z - lse;
  return found > 0.0 ? 0.0 : found;
}

}  // namespace logitless

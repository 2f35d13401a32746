// The log-probability of a word.
#pragma once

#include "math/host_device.h"

namespace logitless {

// z - lse. Of a word that has all of the probability the rounding of z and lse may leave it above
// 0: then 0. What is further above belongs to logits out of range, and stays for all to see.
LOGITLESS_HOST_DEVICE inline double log_prob_of(double z, double lse) {
  const double found = z - lse;
  const double rounding = 1e-5 * (1.0 + (lse < 0.0 ? -lse : lse));
  return found > 0.0 && found < rounding ? 0.0 : found;
}

}  // namespace logitless

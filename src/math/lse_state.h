// Running sum of exponentials in base 2: sum * 2^exponent with an integral exponent, so that
// merging scales by exact powers of two and only the additions round.
#pragma once

#include <cmath>

#include "math/host_device.h"

namespace logitless {

// log2 of e as rounded to fp32, by which kernels multiply logits, and its inverse. value() must use
// the same number: with the exact one every lse would have a relative error of 1.3e-8. The loss of
// logits at 1e5 would be off by 1.3e-3.
inline constexpr double kLog2E = 1.44269502162933349609375;
inline constexpr double kLn2 = 1.0 / kLog2E;

// Limits of logits in log2, at which the fp32 spacing is 64. A row with a larger logit becomes NaN,
// and entries with a smaller one are masked, as with -inf.
inline constexpr float kMostExponent = 0x1p30f;
inline constexpr float kLeastExponent = -0x1p30f;

// {0, 0} is the empty set, and {kMostExponent, inf} a set with +inf: its merges and log-sum-exp are
// infinite.
struct LseState {
  float exponent = 0.0f;
  float sum = 0.0f;
};

LOGITLESS_HOST_DEVICE inline LseState merge(LseState a, LseState b) {
  if (a.sum == 0.0f) return b;
  if (b.sum == 0.0f) return a;
  const float top = fmaxf(a.exponent, b.exponent);
  return {top, a.sum * exp2f(a.exponent - top) + b.sum * exp2f(b.exponent - top)};
}

// Returns the natural log of the represented sum; -inf when empty.
LOGITLESS_HOST_DEVICE inline double value(LseState state) {
  return (static_cast<double>(state.exponent) + log2(static_cast<double>(state.sum))) * kLn2;
}

// Returns the entropy -sum_j p_j log p_j of x_j with sum `sum`, given mean = sum_j x_j log2 x_j /
// sum. No intermediate value grows with the logits.
LOGITLESS_HOST_DEVICE inline double entropy_of(double sum, double mean) {
  return (log2(sum) - mean) * kLn2;
}

// Rebases sum_j x_j log2 x_j, of x_j with sum `sum`, from the exponent `own` to `exponent`. The
// scaling by 2^(own - exponent) is left to the caller.
LOGITLESS_HOST_DEVICE inline double entropy_against(double exponent, double own, double sum,
                                                    double entropy) {
  return entropy + (own - exponent) * sum;
}

}  // namespace logitless

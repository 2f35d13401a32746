// Running sum of exponentials in base 2: sum * 2^exponent with an integral exponent, so that
// merging scales by exact powers of two and only the additions round.
#pragma once

#include <cmath>

#include "math/host_device.h"

namespace logitless {

// log2 of e as fp32 has it, which kernels multiply logits by, and its inverse. What a state stands
// for is read by the same number: with the exact one every lse would be 1.3e-8 of itself off, and
// the loss of logits at 1e5 by 1.3e-3.
inline constexpr double kLog2E = 1.44269502162933349609375;
inline constexpr double kLn2 = 1.0 / kLog2E;

// Of logits in log2, which fp32 rounds to 64 at these and loses beyond them: a row with a greater
// one is no number, and words with a lesser one are masked, as -inf is.
inline constexpr float kMostExponent = 0x1p30f;
inline constexpr float kLeastExponent = -0x1p30f;

// {0, 0} is the empty set.
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

// log of what the state stands for; -inf when empty.
LOGITLESS_HOST_DEVICE inline double value(LseState state) {
  return (static_cast<double>(state.exponent) + log2(static_cast<double>(state.sum))) * kLn2;
}

// The entropy -sum_j p_j log p_j of x_j that sum to `sum`, from mean = sum_j x_j log2 x_j / sum. No
// number in it grows with the logits.
LOGITLESS_HOST_DEVICE inline double entropy_of(double sum, double mean) {
  return (log2(sum) - mean) * kLn2;
}

// sum_j x_j log2 x_j of x_j that sum to `sum`, taken against another exponent than their own,
// before it is scaled by 2^(own - exponent) as they are.
LOGITLESS_HOST_DEVICE inline double entropy_against(double exponent, double own, double sum,
                                                    double entropy) {
  return entropy + (own - exponent) * sum;
}

// The state of a known log-sum-exp.
LOGITLESS_HOST_DEVICE inline LseState lse_state(double lse) {
  if (!(lse > -INFINITY)) return {0.0f, lse == -INFINITY ? 0.0f : static_cast<float>(lse)};
  const double exponent = floor(lse * kLog2E);
  return {static_cast<float>(exponent), static_cast<float>(exp2(lse * kLog2E - exponent))};
}

}  // namespace logitless

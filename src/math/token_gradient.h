// The closed form of every loss's gradient with respect to one token's logits
// (docs/explain/losses.md), with the logit weights w:
//
//   dz_j = p_j (alpha + beta (z_j - lse)) + gamma w_j + sum_k delta_k [j == idx_k]
//   da_j = dz_j * s * (1 - (z_j / c)^2)
//
// beta multiplies a difference of logits, so an offset that all of them have changes nothing.
#pragma once

#include <cmath>

#include "math/host_device.h"
#include "math/softcap.h"

namespace logitless {

// Gradients of the loss with respect to one token's outputs.
struct TokenCotangent {
  double lse = 0.0;           // g_lse, the share of log_prob included
  double entropy = 0.0;       // g_H
  double weighted_sum = 0.0;  // g_m
};

struct TokenGradient {
  double alpha = 0.0;
  double beta = 0.0;
  double gamma = 0.0;
};

// With H = lse - sum_j p_j z_j, dH/dz_j = -p_j (H + z_j - lse).
LOGITLESS_HOST_DEVICE inline TokenGradient token_gradient(const TokenCotangent& g, double entropy) {
  const double g_entropy_term = g.entropy == 0.0 ? 0.0 : g.entropy * entropy;
  return {g.lse - g_entropy_term, -g.entropy, g.weighted_sum};
}

// Returns da at a target: p (alpha + beta log p) + gamma w + delta, without the cancellation of p
// against 1. For cross entropy alpha = -delta, and p alpha + delta = alpha (p - 1).
LOGITLESS_HOST_DEVICE inline double target_coefficient(const TokenGradient& g, double log_prob,
                                                       double z, double logit_weight, double delta,
                                                       double scale, double cap) {
  const double p = exp(log_prob);
  const double slope = g.beta == 0.0 || p == 0.0 ? 0.0 : p * g.beta * log_prob;
  const double flat = g.gamma == 0.0 ? 0.0 : g.gamma * logit_weight;
  const double dz = g.alpha * expm1(log_prob) + (g.alpha + delta) + slope + flat;
  return dz * scale * softcap_slope(z, cap);
}

}  // namespace logitless

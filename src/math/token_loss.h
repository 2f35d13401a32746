// The loss of one token and its derivatives, from the token's log-sum-exp on: the formula of
// logitless/cross_entropy.h. The CPU engine, the GPU engine and the C ABI all use it.
//
//   loss = weight * (sum_k w_k (lse - z_k) + eps / V (C lse - m) + zeta lse^2)
//
// Here w_k = (1 - eps) * class weight * target weight of target k. m = sum_j c_j z_j with the class
// weights c, and C = sum_j c_j.
#pragma once

#include "math/host_device.h"

namespace logitless {

// Coefficients of the additional terms.
struct LossTerms {
  double label_smoothing = 0.0;  // eps
  double z_loss = 0.0;           // zeta
};

// Returns the terms of any struct with these field names.
template <typename Options>
LossTerms loss_terms(const Options& options) {
  return {options.label_smoothing, options.z_loss};
}

// Accumulates the terms of a token, in the order of its functions; value() is then the loss.
// Derivatives are multiplied by `upstream`, the gradient of the loss.
class TokenLoss {
 public:
  LOGITLESS_HOST_DEVICE TokenLoss(const LossTerms& terms, double weight, double upstream)
      : terms_(terms), weight_(weight), upstream_(upstream) {}

  // Adds a target that is not ignored, with log_prob = z - lse. Returns the derivative with respect
  // to its z.
  LOGITLESS_HOST_DEVICE double add_target(double class_weight, double target_weight,
                                          double log_prob) {
    const double w = (1.0 - terms_.label_smoothing) * class_weight * target_weight;
    if (w == 0.0) return 0.0;  // avoids 0 * inf for a masked entry
    loss_ -= w * log_prob;
    by_lse_ += w;
    return -upstream_ * weight_ * w;
  }

  // Returns whether add_smoothing() must be called.
  LOGITLESS_HOST_DEVICE bool smooths() const { return terms_.label_smoothing != 0.0; }
  // Adds label smoothing; weighted_sum is m, class_total is C. Returns the derivative with respect
  // to m.
  LOGITLESS_HOST_DEVICE double add_smoothing(double lse, double weighted_sum, double class_total,
                                             double vocab) {
    const double each = terms_.label_smoothing / vocab;
    loss_ += each * (class_total * lse - weighted_sum);
    by_lse_ += each * class_total;
    return -upstream_ * weight_ * each;
  }

  // Adds the terms of the log-sum-exp alone. Returns the derivative of all terms with respect to
  // it.
  LOGITLESS_HOST_DEVICE double add_lse(double lse) {
    if (terms_.z_loss != 0.0) {
      loss_ += terms_.z_loss * lse * lse;
      by_lse_ += 2.0 * terms_.z_loss * lse;
    }
    return upstream_ * weight_ * by_lse_;
  }

  // A token of weight 0 contributes nothing to the loss, for any logits.
  LOGITLESS_HOST_DEVICE double value() const { return weight_ == 0.0 ? 0.0 : weight_ * loss_; }

 private:
  LossTerms terms_;
  double weight_;
  double upstream_;
  double loss_ = 0.0;
  double by_lse_ = 0.0;
};

}  // namespace logitless

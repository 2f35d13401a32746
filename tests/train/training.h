// Runs steps of a trainer and compares parameters, for tests of training.
#pragma once

#include <algorithm>
#include <vector>

#include "train/run/trainer.h"

namespace logitless::train {

inline std::vector<double> losses(Trainer& trainer, int steps) {
  std::vector<double> result;
  for (int i = 0; i < steps; ++i) result.push_back(trainer.step().loss);
  return result;
}

// Returns options with an order started at step 3 and tried at 5, and with audits every two steps.
inline FarFieldOptions quick_far_field(Accuracy accuracy) {
  FarFieldOptions o;
  o.accuracy = accuracy;
  o.error = 0.3;
  o.audit_every = 2;
  o.refresh_every = 3;
  o.refresh_delay = 2;
  return o;
}

// Returns whether all parameters have the same bits.
inline bool same_values(const Trainer& a, const Trainer& b) {
  for (std::size_t i = 0; i < a.values().size(); ++i) {
    if (!std::ranges::equal(a.values()[i], b.values()[i])) return false;
  }
  return true;
}

}  // namespace logitless::train

// Steps of a trainer, and what it holds, as the tests of training compare them.
#pragma once

#include <algorithm>
#include <vector>

#include "train/trainer.h"

namespace logitless::train {

inline std::vector<double> losses(Trainer& trainer, int steps) {
  std::vector<double> result;
  for (int i = 0; i < steps; ++i) result.push_back(trainer.step().loss);
  return result;
}

// An order begun at step 3, tried at 5, and audits every two steps after that.
inline FarFieldOptions quick_far_field(Accuracy accuracy) {
  FarFieldOptions o;
  o.accuracy = accuracy;
  o.error = 0.3;
  o.audit_every = 2;
  o.refresh_every = 3;
  o.refresh_delay = 2;
  return o;
}

// Of all parameters, to the bit.
inline bool same_values(const Trainer& a, const Trainer& b) {
  for (std::size_t i = 0; i < a.values().size(); ++i) {
    if (!std::ranges::equal(a.values()[i], b.values()[i])) return false;
  }
  return true;
}

}  // namespace logitless::train

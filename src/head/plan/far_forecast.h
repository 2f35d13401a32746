// Predictions of the far field's work before any call, for the choice of a plan.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "head/far_work.h"

namespace logitless {

// Returns the predicted fraction of selected tiles. It is fitted to a head of V = 131072 (6 and 10
// % at tau 0.003); its growth with V is fitted to one of 32768 (docs/use/far_field.md). Only the
// choice of a plan uses it.
inline double predicted_selected(PlanKind kind, std::int64_t vocab, double tau) {
  const double vocab_count = static_cast<double>(vocab) / 131072.0;
  const double reference = kind == PlanKind::far_both ? 0.1 : 0.055;
  return std::min(1.0, reference * std::pow(vocab_count, -1.27) * std::pow(tau / 0.003, -0.6));
}

// Predicts the largest fraction of selected tiles over the ranks of a sharded vocabulary, which
// determines the time of a step. Ids run from frequent to rare, so with one range each the first
// rank selects nearly all. `interleaved`: the vocabulary may be interleaved.
inline double predicted_selected(PlanKind kind, const HeadShape& shape,
                                 const HeadFeatures& features, bool interleaved, double tau) {
  if (features.vocab_ranks == 0) return predicted_selected(kind, shape.vocab, tau);
  const double selected = predicted_selected(kind, shape.global_vocab, tau);
  return std::min(1.0, interleaved ? selected : selected * features.vocab_ranks);
}

// Returns the fraction of pairs that a call samples if it selects the fraction `selected`.
inline double predicted_sample(double selected, std::int64_t sample_every,
                               const HeadFeatures& features) {
  return sample_every > 0 && (features.d_weight || features.d_bias)
             ? (1.0 - selected) / static_cast<double>(sample_every)
             : 0.0;
}

// Returns why the mathematics of a far-field kind cannot serve the features; empty if they can.
inline const char* far_unsuited(PlanKind kind, const HeadFeatures& features) {
  if (features.entropy_gradient)
    return "a gradient through the entropy weighs each vocabulary entry by its logit, which a "
           "tile's mass does "
           "not tell";
  if (features.softcap != 0.0f && features.label_smoothing)
    return "label smoothing under a softcap has a gradient of its own at every vocabulary entry";
  if (kind != PlanKind::far_both) return "";
  if (features.softcap != 0.0f) return "the moments of a tile do not pass through a softcap";
  if (features.argmax || features.entropy)
    return "argmax and entropy need every vocabulary entry's logit";
  return "";
}

}  // namespace logitless

// What the far field adds to the engine (docs/far_field.md): its own inputs of a chunk, its
// statistics, and the audit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "logitless/plan.h"

namespace logitless {

// Above this part of the tiles to keep there is nothing to gain: all are kept, and planners choose
// a dense plan.
inline constexpr double kMostKept = 2.0 / 3.0;

// Passes over tokens * vocab * dim of a call that kept and sampled these parts of its tiles: the
// forward (of far_both: of the kept tiles, and the estimates), the logits of the kept tiles again,
// their gradients, and two products with one point for each tile. Of the sampled ones logits and
// d_weight.
inline double far_passes(PlanKind kind, double kept, double sampled, const HeadShape& shape,
                         const HeadFeatures& features) {
  const double gradients = (features.d_hidden ? 1.0 : 0.0) + (features.d_weight ? 1.0 : 0.0);
  const double backward =
      gradients > 0.0 || features.d_bias
          ? kept * (1.0 + gradients) + gradients / 128.0 + sampled * (features.d_weight ? 2.0 : 1.0)
          : 0.0;
  // Means, variances, and the tokens along the axes.
  const double forward =
      kind == PlanKind::far_both
          ? kept + 2.0 / 128.0 + static_cast<double>(shape.dim) / static_cast<double>(shape.vocab)
          : 1.0;
  return forward + backward;
}

constexpr bool is_far(PlanKind kind) {
  return kind == PlanKind::far_backward || kind == PlanKind::far_both;
}

// The far field keeps about this part of the tiles: fitted to two heads of V = 131072 (10 % at tau
// 0.003) and one of 32768 (58 %; docs/far_field.md). For the choice of a plan alone. sorted: with
// blocks of tokens that keep alike, as on a GPU.
inline double predicted_kept(PlanKind kind, std::int64_t vocab, double tau, bool sorted) {
  const double words = static_cast<double>(vocab) / 131072.0;
  const bool both = kind == PlanKind::far_both;
  const double reference = sorted ? (both ? 0.1 : 0.055) : (both ? 0.15 : 0.1);
  return std::min(1.0, reference * std::pow(words, -1.27) * std::pow(tau / 0.003, -0.6));
}

// The part of the pairs that a call samples which keeps this part of them.
inline double predicted_sample(double kept, std::int64_t sample_every,
                               const HeadFeatures& features) {
  return sample_every > 0 && (features.d_weight || features.d_bias)
             ? (1.0 - kept) / static_cast<double>(sample_every)
             : 0.0;
}

// Why a far-field plan's mathematics cannot serve the features; empty if it can.
inline const char* far_unsuited(PlanKind kind, const HeadFeatures& features) {
  if (features.entropy_gradient)
    return "a gradient through the entropy weighs each word by its logit, which a tile's mass does "
           "not tell";
  if (features.softcap != 0.0f && features.label_smoothing)
    return "label smoothing under a softcap has a gradient of its own at every word";
  if (kind != PlanKind::far_both) return "";
  if (features.softcap != 0.0f) return "the moments of a tile do not pass through a softcap";
  if (features.argmax || features.entropy) return "argmax and entropy need every word's logit";
  return "";
}

// Sums of a call, over its chunks.
struct FarSums {
  std::int64_t kept = 0;
  std::int64_t sampled = 0;
  std::int64_t pairs = 0;
  bool fallback = false;
  double bound_squared = 0.0;
  double norm_squared = 0.0;
};

}  // namespace logitless

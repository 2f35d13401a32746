// What a far-field call did: its passes, and its statistics from the sums of its chunks.
#pragma once

#include <span>

#include "logitless/cross_entropy.h"
#include "math/far_sums.h"

namespace logitless {

constexpr bool is_far(PlanKind kind) {
  return kind == PlanKind::far_backward || kind == PlanKind::far_both;
}

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

// tile_words: of a pair, what is kept or not for a block.
FarFieldStatistics far_statistics(const LossPlan& plan, const FarSums& sums,
                                  std::int64_t tile_words);
// Of words over ranks, from the sums of each: what is of tokens that all ranks have is the same in
// all of them.
FarFieldStatistics far_statistics_of_ranks(const LossPlan& plan, std::span<const FarSums> ranks,
                                           std::int64_t tile_words);

// Whether one of `ranks` has so many of the tiles of all that keeping its own is keeping what there
// is.
inline bool holds_its_part(std::int64_t tiles, std::int64_t tiles_of_all, int ranks) {
  return static_cast<double>(tiles) * ranks > kMostKept * static_cast<double>(tiles_of_all);
}

}  // namespace logitless

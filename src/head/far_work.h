// GEMM counts and statistics of a far-field call, from the sums of its chunks.
#pragma once

#include <span>

#include "logitless/cross_entropy.h"
#include "math/far_sums.h"

namespace logitless {

constexpr bool is_far(PlanKind kind) {
  return kind == PlanKind::far_backward || kind == PlanKind::far_both;
}

// Above this fraction of selected tiles the far field gains nothing: all tiles are selected, and
// planners choose a dense plan.
inline constexpr double kMaxSelected = 2.0 / 3.0;

// Returns the GEMMs (of tokens * vocab * dim multiply-adds) of a call with these fractions of
// selected and sampled tiles.
// - The forward is full, or for far_both that of the selected tiles and the estimates.
// - The backward recomputes the logits of the selected tiles and computes their gradients. Two
//   low-rank products take one centroid for each tile.
// - Sampled tiles take their logits and d_weight.
inline double far_passes(PlanKind kind, double selected, double sampled, const HeadShape& shape,
                         const HeadFeatures& features) {
  const double gradients = (features.d_hidden ? 1.0 : 0.0) + (features.d_weight ? 1.0 : 0.0);
  const double backward = gradients > 0.0 || features.d_bias
                              ? selected * (1.0 + gradients) + gradients / 128.0 +
                                    sampled * (features.d_weight ? 2.0 : 1.0)
                              : 0.0;
  // The estimates take means, variances, and the projection of the tokens on the axes.
  const double forward = kind == PlanKind::far_both
                             ? selected + 2.0 / 128.0 +
                                   static_cast<double>(shape.dim) / static_cast<double>(shape.vocab)
                             : 1.0;
  return forward + backward;
}

// Returns the statistics of a call on one device. `tile_vocab` is the vocabulary entries of a tile,
// the unit of selection.
FarFieldStatistics far_statistics(const LossPlan& plan, const FarSums& sums,
                                  std::int64_t tile_vocab);
// Returns the statistics of a sharded vocabulary from the sums of all ranks. Sums over tokens that
// all ranks have are equal on all of them, and are taken once.
FarFieldStatistics far_statistics_of_ranks(const LossPlan& plan, std::span<const FarSums> ranks,
                                           std::int64_t tile_vocab);

// Returns whether one of `ranks` has so large a share of all tiles that selecting all of its local
// tiles counts as a dense fallback.
inline bool holds_its_part(std::int64_t tiles, std::int64_t tiles_of_all, int ranks) {
  return static_cast<double>(tiles) * ranks > kMaxSelected * static_cast<double>(tiles_of_all);
}

}  // namespace logitless

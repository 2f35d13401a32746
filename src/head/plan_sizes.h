// The sizes of a plan, independent of its device.
#pragma once

#include <cstdint>

#include "logitless/plan.h"

namespace logitless {

// Sizes of a LossPlan, which documents each of them.
struct PlanSizes {
  std::int64_t chunk_tokens = 0;
  std::int64_t block_vocab = 0;
  std::int64_t stored_vocab = 0;
  int weight_ranges = 0;
  std::int64_t first_tokens = 0;
  std::int64_t slice_rows = 0;
  std::int64_t weight_vocab = 0;
};
inline PlanSizes plan_sizes(const LossPlan& plan) {
  return {.chunk_tokens = plan.chunk_tokens,
          .block_vocab = plan.block_vocab,
          .stored_vocab = plan.stored_vocab,
          .weight_ranges = plan.weight_ranges,
          .first_tokens = plan.first_tokens,
          .slice_rows = plan.slice_rows,
          .weight_vocab = plan.weight_vocab};
}

// Returns whether a plan fits calls with these features. The strides of d_weight matter only if its
// memory is reused before it holds d_weight.
inline bool serves(const LossPlan& plan, HeadFeatures features) {
  if (plan.weight_ranges == 0) features.d_weight_strided = plan.features.d_weight_strided;
  return plan.features == features;
}

inline bool is_dense_in_one_chunk(const LossPlan& plan) {
  const std::int64_t first = plan.weight_ranges > 0 ? plan.first_tokens : plan.chunk_tokens;
  return plan.kind == PlanKind::dense && first >= plan.shape.tokens;
}

}  // namespace logitless

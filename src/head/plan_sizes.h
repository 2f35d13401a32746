// The sizes of a plan, whatever device it is for.
#pragma once

#include <cstdint>

#include "logitless/plan.h"

namespace logitless {

// Of LossPlan, which says what they are.
struct PlanSizes {
  std::int64_t chunk_tokens = 0;
  std::int64_t slab_vocab = 0;
  std::int64_t stored_vocab = 0;
};
inline PlanSizes plan_sizes(const LossPlan& plan) {
  return {.chunk_tokens = plan.chunk_tokens,
          .slab_vocab = plan.slab_vocab,
          .stored_vocab = plan.stored_vocab};
}

}  // namespace logitless

// What parts of a CPU's plan cost a core beside its products, and where sizes end.
#pragma once

#include <cstdint>

namespace logitless {

// The least chunk a plan comes down to: smaller ones repack the weights for little work.
inline constexpr std::int64_t kLeastTokens = 64;
inline constexpr std::int64_t kMostSlab = 2048;  // words
// Of one element of the weights, or of hidden, for packing, each time; of one logit for its
// exponential; of one element of d_hidden, read and written in fp32 once for each slab.
inline constexpr double kPackSeconds = 0.4e-9;
inline constexpr double kExpSeconds = 0.5e-9;
inline constexpr double kSlabSeconds = 0.3e-9;

}  // namespace logitless

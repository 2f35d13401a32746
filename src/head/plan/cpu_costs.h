// Costs per core of a CPU plan beyond its GEMMs, and limits of its sizes.
#pragma once

#include <cstdint>

namespace logitless {

// Smallest chunk of a plan: smaller chunks repack the weights for too little work.
inline constexpr std::int64_t kLeastTokens = 64;
inline constexpr std::int64_t kMaxBlock = 2048;  // vocabulary entries
// Seconds to pack one element of the weights or of hidden once; for the exponential of one logit;
// and to read and write one fp32 element of d_hidden for each vocabulary block.
inline constexpr double kPackSeconds = 0.4e-9;
inline constexpr double kExpSeconds = 0.5e-9;
inline constexpr double kBlockSeconds = 0.3e-9;

}  // namespace logitless

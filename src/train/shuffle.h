// The order in which a training run visits its examples.
#pragma once

#include <cstdint>

namespace logitless::train {

// The `index`-th example of a training run: every epoch visits each of `size` examples once, in an
// order of its own. A function of its arguments alone, so that a run goes on from anywhere.
std::int64_t shuffled(std::uint64_t seed, std::int64_t size, std::int64_t index);

}  // namespace logitless::train

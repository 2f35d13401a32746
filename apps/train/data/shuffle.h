// The order in which a training run visits its examples.
#pragma once

#include <cstdint>

namespace logitless::train {

// Returns the `index`-th example of a training run: every epoch visits each of `size` examples
// once, in an order of its own. It is a function of its arguments alone, so that a run continues
// from anywhere.
std::int64_t shuffled(std::uint64_t seed, std::int64_t size, std::int64_t index);

}  // namespace logitless::train

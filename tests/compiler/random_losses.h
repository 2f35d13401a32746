// Random losses in the way people write them: hidden states, weights, their products and losses of
// these, with gradients by all parameters.
#pragma once

#include <logitless/graph.h>

#include <cstdint>

namespace logitless::test {

enum class LossSize : std::uint8_t {
  small,  // for the interpreter: some hundred logits
  head,   // for the head engine: 1 MiB of logits, and few operations on them
};

// Parameters named t... are indices below the size that ends their name. The others have this
// dtype: f64, f32 or 16 bit.
Graph random_loss(std::uint64_t seed, DType dtype, LossSize size);

}  // namespace logitless::test

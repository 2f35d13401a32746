// Random losses as people write them: hidden states and weights made in some way, their products,
// and what is made of those, with gradients by all parameters.
#pragma once

#include <logitless/graph.h>

#include <cstdint>

namespace logitless::test {

enum class LossSize : std::uint8_t {
  small,  // for the interpreter: some hundred logits
  head,   // as the head engine takes them: 1 MiB of logits, and few operations on them
};

// Parameters named t... are indices of at most the size that their name ends in; the others are of
// this dtype, f64 or f32 or a 16-bit one.
Graph random_loss(std::uint64_t seed, DType dtype, LossSize size);

}  // namespace logitless::test

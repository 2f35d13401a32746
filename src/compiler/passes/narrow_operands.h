// narrow-operands: multiplies 16-bit values as they are
//
//   dot(cast f32 (x: bf16), cast f32 (y: bf16)) : f32   ->   dot(x, y) : f32
//   dot(2 * cast f32 (x: bf16), ...)                    ->   dot(2 * x: bf16, ...)
//
// Products of 16-bit numbers are exact in fp32, and so are sums up to their order. A GPU multiplies
// 16-bit operands many times faster, and their casts need no memory. A factor is a power of two, 1
// or more, of bf16 alone: doubling is exact there, and overflows where it does in fp32.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Removes the casts that nothing else reads.
Graph narrow_operands(const Graph& graph);

}  // namespace logitless::ir

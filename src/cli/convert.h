// Tensors of one element type made into another, in parallel.
#pragma once

#include "logitless/memory.h"
#include "logitless/tensor_view.h"

namespace logitless::cli {

// A contiguous tensor and the memory it lives in.
struct OwnedTensor {
  Buffer memory;
  TensorView view;
};

// Uninitialised.
OwnedTensor make_tensor(DType dtype, std::span<const std::int64_t> shape);

// Floating types to f32, bf16 or f16, rounded to nearest even. `from` is contiguous, of any
// alignment.
OwnedTensor convert(const ConstTensorView& from, DType to);

// q i8 [V, D] and scale f32 [V] -> q[v, d] * scale[v], the product rounded to f32 and then to `to`.
OwnedTensor dequantise(const ConstTensorView& q, const ConstTensorView& scale, DType to);

// Normal numbers of mean 0. The same seed gives the same tensor for any number of threads.
OwnedTensor random_normal(DType dtype, std::span<const std::int64_t> shape, double deviation,
                          std::uint64_t seed);

// i32 [count], each equally likely in [0, limit).
OwnedTensor random_targets(std::int64_t count, std::int64_t limit, std::uint64_t seed);

}  // namespace logitless::cli

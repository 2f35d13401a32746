// Converts tensors between dtypes, in parallel.
#pragma once

#include "logitless/memory.h"
#include "logitless/tensor_view.h"

namespace logitless::cli {

// A contiguous tensor that owns its memory.
struct OwnedTensor {
  Buffer memory;
  TensorView view;
};

// Allocates a tensor without initialising it.
OwnedTensor make_tensor(DType dtype, std::span<const std::int64_t> shape);

// Converts floating dtypes to f32, bf16 or f16, rounded to nearest even. `from` is contiguous, of
// any alignment.
OwnedTensor convert(const ConstTensorView& from, DType to);

// Dequantises rows: q i8 [V, D], scale f32 [V] -> q[v, d] * scale[v]. The product is rounded to f32
// and then to `to`.
OwnedTensor dequantise(const ConstTensorView& q, const ConstTensorView& scale, DType to);

// Returns normal random numbers of mean 0. The same seed gives the same tensor for any number of
// threads.
OwnedTensor random_normal(DType dtype, std::span<const std::int64_t> shape, double deviation,
                          std::uint64_t seed);

// Returns i32 [count], uniform in [0, limit).
OwnedTensor random_targets(std::int64_t count, std::int64_t limit, std::uint64_t seed);

}  // namespace logitless::cli

// Orders of the vocabulary made on a GPU (include/logitless/vocab_order.h).
#pragma once

#include "kernels/device_far.h"

namespace logitless::cuda {

// Bisection of words down to tiles of 128. All pointers are the device's.
struct OrderCall {
  DType dtype = DType::bf16;
  const void* weight = nullptr;  // [vocab, dim], rows of contiguous elements
  std::int64_t stride = 0;       // of rows, in elements
  std::int64_t vocab = 0;
  std::int64_t dim = 0;
  const float* average = nullptr;  // [vocab] finite, >= 0
  std::int64_t per_stratum = 0;    // words of all strata but the last: a multiple of 128
  std::uint64_t seed = 0;
  std::int32_t* words = nullptr;  // [vocab], out: the word at each position
  void* workspace = nullptr;      // order_workspace_bytes(vocab, dim), aligned to 256
  Stream stream = nullptr;
};
// 20 bytes a word, 3 KiB a column, and what sorting takes: about 12 bytes a word.
std::size_t order_workspace_bytes(std::int64_t vocab, std::int64_t dim);
// Words by average, in strata; each stratum split again and again at the middle, in whole tiles, of
// its rows along their first principal direction. Deterministic. Waits at each level. Throws
// DeviceError.
void order_words(const OrderCall& call);

// Moments of the tiles of an order, and the caution of each (logitless/vocab_order.h).
struct MomentsCall {
  // [rows, dim] and [vocab, dim] bf16, strides multiples of 8; bias, and logit_scale.
  ForwardCall head;
  DeviceOrder order;
  float tau = 0.0f;
  float* axes = nullptr;      // [dim, dim], out
  float* variance = nullptr;  // [T, dim], out
  float* caution = nullptr;   // [T], out
  void* workspace = nullptr;  // moments_workspace_bytes(), aligned to 256
};
// Empty, or what is missing.
std::string moments_unsupported();
// Why the Hopper kernels do not take a call, its pointers and strides included (the tensor memory
// accelerator reads rows that start at multiples of 16 bytes); empty if they do.
std::string hopper_unsupported(const ForwardCall& call);
// 20 B * dim^2, 6 B * 8192 dim, 10 B * T dim, 12 B * rows * T, 16 B * vocab, and what cuBLAS,
// cuSOLVER and the forward take. Throws DeviceError.
std::size_t moments_workspace_bytes(const ForwardShape& shape);
// All but the cautions; those go by the totals of the head's rows, which lie in the workspace and
// may be made larger by other words' first. Deterministic. Throws DeviceError.
struct MomentTotals {
  float* lse = nullptr;             // [rows]
  float* log2_estimated = nullptr;  // [rows]
};
MomentTotals measure_moments(const MomentsCall& call);
// With the workspace as measure_moments has left it.
void find_cautions(const MomentsCall& call);

}  // namespace logitless::cuda

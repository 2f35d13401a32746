// Vocabulary orders computed on a GPU (include/logitless/vocab_order.h).
#pragma once

#include "kernels/device/far.h"
#include "kernels/device/kernel.h"

namespace logitless::cuda {

// Recursive bisection of the vocabulary down to tiles of 128. All pointers are of the device.
struct OrderCall {
  DType dtype = DType::bf16;
  const void* weight = nullptr;  // [vocab, dim], rows of contiguous elements
  std::int64_t stride = 0;       // elements from row to row
  std::int64_t vocab = 0;
  std::int64_t dim = 0;
  const float* average = nullptr;  // [vocab] finite, >= 0
  std::int64_t per_stratum = 0;    // entries in each stratum but the last: a multiple of 128
  std::uint64_t seed = 0;
  std::int32_t* vocab_ids = nullptr;  // [vocab], out: the vocabulary entry at each position
  void* workspace = nullptr;          // order_workspace_bytes(vocab, dim), aligned to 256
  Stream stream = nullptr;
};
// 20 bytes a vocabulary entry, 3 KiB a column, and about 12 bytes an entry for sorting.
std::size_t order_workspace_bytes(std::int64_t vocab, std::int64_t dim);
// Sorts the vocabulary by average into strata. Each stratum is bisected repeatedly in the middle,
// in full tiles, along the first principal direction of its rows. Deterministic. Waits for the
// device at each level. Throws DeviceError.
void order_vocab(const OrderCall& call);

// Moments of an order's tiles, and the caution of each (logitless/vocab_order.h).
struct MomentsCall {
  // hidden [rows, dim] and weight [vocab, dim] bf16 or f16, strides multiples of 8; also bias and
  // logit_scale
  ForwardCall head;
  const DeviceKernel* kernel = nullptr;  // one with a far field
  DeviceOrder order;
  float tau = 0.0f;
  float* axes = nullptr;      // [dim, dim], out
  float* variance = nullptr;  // [T, dim], out
  float* caution = nullptr;   // [T], out
  void* workspace = nullptr;  // moments_workspace_bytes(), aligned to 256
};
// Returns what is missing, or empty.
std::string moments_unsupported();
// 20 B * dim^2, 6 B * 8192 dim, 10 B * T dim, 12 B * rows * T, 16 B * vocab, and the workspaces of
// cuBLAS, cuSOLVER and the forward. Throws DeviceError.
std::size_t moments_workspace_bytes(const DeviceKernel& kernel, const ForwardShape& shape);
// Computes everything but the cautions, which follow from the totals of the head's rows. The totals
// are in the workspace; with a sharded vocabulary, those of other shards may be merged in first.
// Deterministic. Throws DeviceError.
struct MomentTotals {
  float* lse = nullptr;             // [rows]
  float* log2_estimated = nullptr;  // [rows]
};
MomentTotals measure_moments(const MomentsCall& call);
// Computes the cautions from the workspace of measure_moments.
void find_cautions(const MomentsCall& call);

}  // namespace logitless::cuda

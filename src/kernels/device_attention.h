// Attention on a GPU. No CUDA headers here: a build without CUDA answers every call with the
// reason.
//
// Calls enqueue on a stream and return: nothing waits or allocates, all may be captured into a CUDA
// graph. The same operands give the same bits: sums have a fixed order, and no sum is atomic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/device_head.h"
#include "logitless/dtype.h"

namespace logitless::cuda {

// softmax(scale * q k^T) v, row by row, without the matrix of scores.
//   q, out [B, H, T, D]    k, v [B, Hkv, S, D]    H a multiple of Hkv: query head h reads h / (H /
//   Hkv)
// Products are summed in fp32; probabilities and gradients of scores are rounded to the dtype of
// the operands for their products. Causal: query t sees the keys s <= t + (S - T). A row that sees
// no key gives 0, and -inf as its log-sum-exp.
struct AttentionCall {
  // The last dimension is contiguous; strides count elements.
  struct Operand {
    const void* data = nullptr;
    std::int64_t stride_b = 0, stride_h = 0, stride_t = 0;
  };
  struct Output {
    void* data = nullptr;
    std::int64_t stride_b = 0, stride_h = 0, stride_t = 0;
  };
  std::int64_t batch = 1, heads = 1, kv_heads = 1, queries = 0, keys = 0, dim = 0;
  DType dtype = DType::bf16;  // of every operand and output: bf16 | f16 | f32
  bool causal = false;
  float scale = 1.0f;
  Operand q, k, v;
  // Log-sum-exp of each row of scaled scores [B, H, T], contiguous. Written by the forward, read by
  // the backward.
  float* lse = nullptr;
  // The forward's.
  Output result;
  // The backward's: out and lse as the forward left them; d_q, d_k, d_v are written, not added to.
  Operand out, d_out;
  Output d_q, d_k, d_v;
  void* scratch = nullptr;  // attention_scratch_bytes(), aligned to 256
  Stream stream = nullptr;
};

// Empty, or why no kernel of a device of this compute capability takes the call, naming what was
// expected. Reads sizes, dtype and flags; strides and pointers must be known only to the calls.
std::string attention_unsupported(const AttentionCall& call, int compute_capability);
// Of both directions. Pure: reads sizes, dtype and flags.
std::size_t attention_scratch_bytes(const AttentionCall& call, bool backward,
                                    int compute_capability);
void attention_forward(const AttentionCall& call);
void attention_backward(const AttentionCall& call);

}  // namespace logitless::cuda

// Fused attention on a GPU. It includes no CUDA headers; in a build without CUDA every call throws
// the reason.
//
// Calls enqueue on a stream. They neither wait nor allocate, and may be captured into a CUDA graph.
// Results are deterministic: sums have a fixed order and use no atomics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/device/head.h"
#include "logitless/dtype.h"

namespace logitless::cuda {

// softmax(scale * q k^T) v without materialising the scores.
//   q, out [B, H, T, D]    k, v [B, Hkv, S, D]    H a multiple of Hkv.
//   Query head h reads key head h / (H / Hkv).
// Sums are fp32; probabilities and score gradients are rounded to the dtype of the operands for
// their GEMMs. Causal: query t sees the keys s <= t + (S - T). A row that sees no key gives 0, and
// -inf as its log-sum-exp.
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
  // Log-sum-exp of each row of scaled scores [B, H, T], contiguous. The forward writes it, the
  // backward reads it.
  float* lse = nullptr;
  // Output of the forward.
  Output result;
  // Operands of the backward: out and lse of the forward. d_q, d_k, d_v are written, not added to.
  Operand out, d_out;
  Output d_q, d_k, d_v;
  void* scratch = nullptr;  // attention_scratch_bytes(), aligned to 256
  Stream stream = nullptr;
};

// Returns why no kernel for this compute capability supports the call, naming the expected values,
// or empty. Reads sizes, dtype and flags only.
std::string attention_unsupported(const AttentionCall& call, int compute_capability);
// Scratch of either direction. Pure: reads sizes, dtype and flags.
std::size_t attention_scratch_bytes(const AttentionCall& call, bool backward,
                                    int compute_capability);
void attention_forward(const AttentionCall& call);
void attention_backward(const AttentionCall& call);

}  // namespace logitless::cuda

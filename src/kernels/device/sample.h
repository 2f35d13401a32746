// Samples of tokens on a GPU from stored logits. One GEMM writes the logits of a chunk, and a
// kernel draws tokens from them. The epilogues of the head's forward then run on them, for
// log-probabilities.
#pragma once

#include "kernels/device/kernel.h"

namespace logitless::cuda {

// A number of each token, [all tokens], or one for all. Null: not used.
struct TokenNumbers {
  const float* data = nullptr;
  bool per_token = false;
};

// Samples of a chunk of tokens, as in logitless/sample.h, without top_k and top_p.
struct SampleCall {
  // Operands of the chunk. `targets` are set to `tokens`. Output: log_prob [tokens], or null.
  ForwardCall chunk;
  const float* logit_bias = nullptr;  // [vocab], or null
  // The noise's key, i64 [2] of 32 bits each, and counters i32 | i64 [all tokens]; null: the
  // indices of the tokens.
  const std::int64_t* key = nullptr;
  const void* counter = nullptr;
  bool int64_counter = false;
  TokenNumbers temperature, min_p;
  void* tokens = nullptr;  // [all tokens] i32 | i64
  bool int64_tokens = false;
};

// Returns why a kernel's logits are not stored for samples, or empty.
std::string sample_unsupported(const DeviceKernel& kernel);
// Bytes of call.chunk.workspace, aligned to 256: fp32 logits [tokens, vocab padded to 256], and
// those of the forward.
std::size_t sample_bytes(const ForwardShape& shape);

// Enqueues the samples of a chunk. Log-probabilities have the bits of the kernel's forward. Tokens
// depend neither on the chunk nor on the other tokens. Deterministic.
void sample_tokens(const SampleCall& call);

}  // namespace logitless::cuda

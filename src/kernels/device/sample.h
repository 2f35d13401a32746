// Samples and best entries of tokens on a GPU from stored logits. One GEMM writes the logits of a
// chunk, and kernels draw tokens from them or select entries. The epilogues of the head's forward
// then run on them, for log-probabilities.
#pragma once

#include "kernels/device/kernel.h"

namespace logitless::cuda {

// A number of each token, [all tokens], or one for all. Null: not used.
struct TokenNumbers {
  const float* data = nullptr;
  bool per_token = false;
};

// Samples of a chunk of tokens, as in logitless/sample.h.
struct SampleCall {
  const DeviceKernel* kernel = nullptr;  // with a StoredForward
  // Operands of the chunk. `targets` are set to `tokens`. Output: log_prob [tokens], or null.
  ForwardCall chunk;
  const float* logit_bias = nullptr;  // [vocab], or null
  // The noise's key, i64 [2] of 32 bits each, and counters i32 | i64 [all tokens]; null: the
  // indices of the tokens.
  const std::int64_t* key = nullptr;
  const void* counter = nullptr;
  bool int64_counter = false;
  TokenNumbers temperature, top_p, min_p;
  std::int64_t top_k = 0;  // 0: all
  void* tokens = nullptr;  // [all tokens] i32 | i64
  bool int64_tokens = false;
};

// Bytes of call.chunk.workspace, aligned to 256: fp32 logits [tokens, vocab padded to 256], and
// those of the forward.
std::size_t sample_bytes(const DeviceKernel& kernel, const ForwardShape& shape);

// Enqueues the samples of a chunk. Log-probabilities have the bits of the kernel's forward. Tokens
// depend neither on the chunk nor on the other tokens. Deterministic. Sums of probabilities for
// top_p are exact sums of fp32 exponentials, rounded to multiples of at most vocab 2^-63.
void sample_tokens(const SampleCall& call);

// The best entries of a chunk of tokens.
inline constexpr std::int64_t kMostBestEntries = 2048;
struct BestCall {
  const DeviceKernel* kernel = nullptr;  // with a StoredForward
  // Operands of the chunk. `targets` are set to `wanted`, of which shape.targets_per_token has the
  // ids of a token. Output: log_prob [tokens, ids].
  ForwardCall chunk;
  std::int64_t k = 1;             // at most kMostBestEntries
  const void* targets = nullptr;  // [all tokens] i32 | i64, or null
  bool int64_targets = false;
  // [all tokens, k or k + 1]: the ids of the k greatest logits in ascending order, of equal ones
  // the lower ids; then the target.
  std::int64_t* wanted = nullptr;
};

// Enqueues the best entries of a chunk and their log-probabilities, with sample_bytes() of
// workspace. Likewise deterministic.
void best_entries(const BestCall& call);

}  // namespace logitless::cuda

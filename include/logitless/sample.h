// Samples tokens from a head, and finds its best entries; the full logits never exist.
//
//   z_ij = the logits of cross_entropy.h
//   s_ij = (z_ij + logit_bias_j) / temperature_i
//   tokens_i = argmax over the entries j that are kept of s_ij + noise_ij
//
// With Gumbel noise this is an exact sample of the softmax of s over the entries that are kept.
// top_k keeps the largest entries. Of those, top_p keeps the smallest set of the largest ones whose
// probabilities sum to at least top_p. min_p keeps the entries of at least min_p times the largest
// probability. Entries equal to the last one that is kept are kept as well.
//
// The noise of an entry is a function of the seed, the low 32 bits of its token's counter, and its
// vocabulary id: Philox-4x32-10, 39 random bits. So a token does not depend on the others of its
// call. Tokens are those of Python's linear_sample for the same seed and counters. On a CPU
// log_prob has the bits of head_forward for these tokens; likewise with the Hopper kernels.
//
// Hidden states and weight of two dtypes are multiplied in f32. A program then widens the one of 16
// bits: its workspace holds 4 V D bytes for such a weight, which the head reads as it is.
//
// The vocabulary is whole: inputs have no sharding. Python samples from a vocabulary over ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "logitless/context.h"
#include "logitless/export.h"
#include "logitless/tensor_view.h"
#include "logitless/workspace.h"

namespace logitless {

struct SampleOptions {
  float temperature = 1.0f;  // >= 0; 0 takes the largest entry, the first of equal ones
  std::int64_t top_k = 0;    // 1 to V; 0: all
  float top_p = 1.0f;        // above 0 and at most 1; 1: all
  float min_p = 0.0f;        // 0 to 1; 0: all
  std::uint64_t seed = 0;
  float softcap = 0.0f;  // > 0; 0: none
  float logit_scale = 1.0f;
};

// [...] are the leading dimensions of hidden, at most two. Tensors are contiguous; on a GPU they
// are in its memory, aligned to 16 bytes. Values of arrays are not checked: a negative temperature
// takes the largest entry.
struct SampleInputs {
  ConstTensorView hidden = {};  // [..., D] f32 | bf16 | f16
  // [V, D], the dtype of hidden; on a CPU f32 beside 16 bits, or 16 bits beside f32
  ConstTensorView weight = {};
  ConstTensorView bias = {};         // optional [V], f32, or on a CPU the dtype of weight
  ConstTensorView logit_bias = {};   // optional f32 [V]; -inf forbids an entry
  ConstTensorView temperature = {};  // optional f32 [...], instead of the option; as the two below
  ConstTensorView top_p = {};
  ConstTensorView min_p = {};
  ConstTensorView counter = {};  // optional i32 | i64 [...]; without it the index of the token
  // optional i64 [2]: the noise's key, 32 bits each, instead of that of the seed. A CUDA graph
  // reads it at each replay.
  ConstTensorView key = {};
};

// Outputs overlap neither inputs nor each other.
struct SampleOutputs {
  TensorView tokens = {};  // i32 | i64 [...]
  // optional f32 [...]: by the whole softmax of z, without temperature, filters and logit_bias
  TensorView log_prob = {};
};

struct TopLogProbsOptions {
  std::int64_t k = 1;  // 1 to V
  float softcap = 0.0f;
  float logit_scale = 1.0f;
};

struct TopLogProbsInputs {
  ConstTensorView hidden = {};   // as in SampleInputs
  ConstTensorView weight = {};   // [V, D]
  ConstTensorView bias = {};     // optional [V]
  ConstTensorView targets = {};  // optional i32 | i64 [...], for log_prob
};

// Log-probabilities have the bits of head_forward for these ids and targets as targets [..., K].
struct TopLogProbsOutputs {
  TensorView top_log_probs = {};  // f32 [..., K], the largest first, equal ones by their ids
  TensorView top_ids = {};        // i32 | i64 [..., K]
  TensorView log_prob = {};       // f32 [...], of the targets
};

// The programs and the head's plan of such calls, for a context's device and threads. A value:
// cheap to copy, immutable. It serves calls of the same shapes and dtypes, with other seeds,
// temperatures, top_p and min_p.
class LOGITLESS_API SamplePlan {
 public:
  struct State;  // private

  SamplePlan() = default;
  // Returns the exact bytes of the one allocation that a call needs beyond inputs and outputs.
  std::size_t workspace_bytes() const;
  // Explains the programs and the head's plan; "" for an empty plan and without tokens.
  std::string explain() const;

 private:
  friend struct SampleAccess;
  std::shared_ptr<const State> state_;
};

// Plan calls from shapes and dtypes, without reading data. memory_budget: the ceiling of the
// workspace in bytes; 0: the least memory that costs little time. The kernels of GPUs store fp32
// logits in it, of at least 256 tokens, and without a budget at most 512 MiB. Programs sample in
// smaller budgets, in fp32 with a budget, and find more than 2048 best entries. On a GPU planning
// compiles and loads kernels, which is the only allocation there. Throw InvalidArgument that names
// the argument, or a budget below the least plan; Unsupported where the device has no kernel or
// library.
LOGITLESS_API SamplePlan plan_sample(const Context& context, const SampleOptions& options,
                                     const SampleInputs& inputs, const SampleOutputs& outputs,
                                     std::size_t memory_budget = 0);
LOGITLESS_API SamplePlan plan_top_logprobs(const Context& context,
                                           const TopLogProbsOptions& options,
                                           const TopLogProbsInputs& inputs,
                                           const TopLogProbsOutputs& outputs,
                                           std::size_t memory_budget = 0);

// Run a plan: one GEMM where logits are stored. Otherwise one for the ids, and one for
// log-probabilities where they are asked for. On a GPU they enqueue on the
// context's stream and return. A CUDA graph may capture them: it keeps the numbers of the options,
// so its replays draw new tokens by other counters in the same memory. Deterministic for any number
// of threads. Throw InvalidArgument where the call is not the plan's, with nothing written: filters
// that the plan was made without are refused, and a plan of temperature 0 without a tensor takes no
// other one.
LOGITLESS_API void sample(const Context& context, const SamplePlan& plan,
                          const SampleOptions& options, const SampleInputs& inputs,
                          const SampleOutputs& outputs, const Workspace& workspace);
LOGITLESS_API void top_logprobs(const Context& context, const SamplePlan& plan,
                                const TopLogProbsOptions& options, const TopLogProbsInputs& inputs,
                                const TopLogProbsOutputs& outputs, const Workspace& workspace);

// The same with their own plan and workspace; on a GPU they wait.
LOGITLESS_API void sample(const Context& context, const SampleOptions& options,
                          const SampleInputs& inputs, const SampleOutputs& outputs,
                          std::size_t memory_budget = 0);
LOGITLESS_API void top_logprobs(const Context& context, const TopLogProbsOptions& options,
                                const TopLogProbsInputs& inputs, const TopLogProbsOutputs& outputs,
                                std::size_t memory_budget = 0);

}  // namespace logitless

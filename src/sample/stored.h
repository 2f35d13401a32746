// Samples and best entries from stored logits on a GPU: one GEMM for ids and log-probabilities, by
// kernels/device/sample.h, in place of a program and the head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "logitless/context.h"
#include "logitless/plan.h"
#include "logitless/sample.h"
#include "sample/form.h"

namespace logitless {

struct SampleNumbers;  // state.h

namespace cuda {
struct DeviceKernel;
}

struct StoredLogits {
  const cuda::DeviceKernel* kernel = nullptr;  // of the head
  std::int64_t chunk_tokens = 0;               // tokens whose logits are stored at a time; 0: none
  std::size_t bytes = 0;                       // of the workspace

  explicit operator bool() const { return chunk_tokens > 0; }
};

// Plan calls beside `head`, the plan of the head's forward without a budget. Without a budget (0) a
// chunk has at most 512 MiB of logits, or the least tokens: 256, or a strip of the cuBLAS head.
// They return none where:
// - the kernel stores no logits, or the least tokens exceed the budget
// - the chunks of the cuBLAS head would change the bits of log-probabilities
// - the head's argmax alone serves, or the best entries of a token are too many
StoredLogits plan_stored(const SampleForm& form, const LossPlan& head, bool log_prob,
                         std::size_t memory_budget);
StoredLogits plan_stored(const TopForm& form, const LossPlan& head, std::size_t memory_budget);
std::string explain_stored(const StoredLogits& stored, const LogitsForm& form);

// Enqueues samples of the planned form. numbers: on the GPU, of the options. workspace:
// stored.bytes, aligned to 256.
void sample_stored(const Context& context, const StoredLogits& stored, const SampleForm& form,
                   const SampleInputs& in, const SampleOutputs& out, const SampleNumbers* numbers,
                   void* workspace);
// Enqueues the ids `wanted` i64 [N, form.wanted()] of best_graph() in formula.h and their
// log-probabilities `found`.
void best_stored(const Context& context, const StoredLogits& stored, const TopForm& form,
                 const TopLogProbsInputs& in, std::int64_t* wanted, float* found, void* workspace);

}  // namespace logitless

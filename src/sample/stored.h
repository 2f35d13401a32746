// Samples from stored logits on a GPU: one GEMM for tokens and log-probabilities, by
// kernels/device/sample.h, in place of a program and the head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "logitless/context.h"
#include "logitless/sample.h"
#include "sample/form.h"

namespace logitless {

struct SampleNumbers;  // state.h

struct StoredLogits {
  std::int64_t chunk_tokens = 0;  // tokens whose logits are stored at a time; 0: none
  std::size_t bytes = 0;          // of the workspace

  explicit operator bool() const { return chunk_tokens > 0; }
};

// Plans samples beside `kernel`, that of the head's forward. Without a budget (0) a chunk has at
// most 512 MiB of logits, or 256 tokens. Returns none where a filter orders the logits, the kernel
// stores none, 256 tokens exceed the budget, or the head's argmax alone serves.
StoredLogits plan_stored(const SampleForm& form, std::string_view kernel, bool log_prob,
                         std::size_t memory_budget);
std::string explain_stored(const StoredLogits& stored, const SampleForm& form,
                           std::string_view kernel);

// Enqueues samples of the planned form. numbers: on the GPU, of the options. workspace:
// stored.bytes, aligned to 256.
void sample_stored(const Context& context, const StoredLogits& stored, const SampleForm& form,
                   const SampleInputs& in, const SampleOutputs& out, const SampleNumbers* numbers,
                   void* workspace);

}  // namespace logitless

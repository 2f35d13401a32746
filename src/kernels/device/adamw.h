// Fused AdamW over many tensors on a GPU. It includes no CUDA headers; in a build without CUDA
// every call throws the reason.
//
// Calls enqueue on a stream. They neither wait nor allocate, and may be captured into a CUDA graph.
// Results are deterministic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device/head.h"

namespace logitless::cuda {

// All f32 [count], except `rounded`; aligned to 16 bytes.
struct AdamWTensor {
  float* value = nullptr;
  float* gradient = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  void* rounded = nullptr;  // bf16 [count], copy of value; null: not wanted
  std::int64_t count = 0;
  bool decay = false;
};

// Scalars of a step that change from step to step, in device memory.
struct AdamWRates {
  float move = 0.0f;          // rate / (1 - beta1^step)
  float inverse2 = 0.0f;      // 1 / (1 - beta2^step)
  float decay_factor = 1.0f;  // 1 - rate * weight_decay
  std::int32_t note = 0;      // caller's value, returned in the report
};

struct AdamWReport {
  double loss = 0.0;
  double norm = 0.0;         // of the gradients before clipping
  std::int64_t skipped = 0;  // 1: this step changed nothing
  std::int64_t note = 0;     // the greatest of all ranks' rates
};

// Partial sums that a rank contributes to a step of several ranks.
struct AdamWTotals {
  double loss = 0.0;
  double squares = 0.0;  // sum of squares of its gradients
  std::int64_t note = 0;
};

// Layout of the optimizer's memory; offsets in bytes, multiples of 256. Pure.
struct AdamWOffsets {
  std::int64_t blocks = 0;  // blocks that tensors are cut into
  std::size_t tensors = 0, cuts = 0, partial = 0, state = 0, end = 0;
};
AdamWOffsets adamw_offsets(std::span<const std::int64_t> counts);
// Builds the contents of the first `state` bytes of the memory, for `tensors` with the counts of
// adamw_offsets.
std::vector<std::byte> adamw_tables(std::span<const AdamWTensor> tensors);

struct AdamWCall {
  AdamWOffsets places;
  void* memory = nullptr;  // `places.end` bytes, aligned to 256
  float beta1 = 0.0f, beta2 = 0.0f, keep1 = 0.0f, keep2 = 0.0f;  // keep: 1 - beta
  float epsilon = 0.0f;
  double clip = 0.0;  // gradient norm to clip at; 0: no clipping
  Stream stream = nullptr;
};

// Resets the sum of losses to 0 and clears the skipped state.
void adamw_reset(const AdamWCall& call);
// Sets the sum of losses to *loss, or adds to it with `add`.
void adamw_loss(const AdamWCall& call, const float* loss, bool add);
// Runs the step and writes its report. With g = gradient, times clip / norm where the norm is above
// clip:
//   m = beta1 m + keep1 g     v = beta2 v + keep2 g^2
//   value = (decay ? decay_factor : 1) value - move m / (sqrt(v inverse2) + epsilon)
// in f32, and rounded = value; the norm is in double. After a loss or norm that is not finite,
// steps change nothing until adamw_reset().
void adamw_step(const AdamWCall& call, const AdamWRates* rates, AdamWReport* report);
// Run a step of several ranks that each have their own tensors: first this rank's totals, then the
// step with the totals of all [ranks], summed in rank order.
void adamw_totals(const AdamWCall& call, const AdamWRates* rates, AdamWTotals* totals);
void adamw_step_of_ranks(const AdamWCall& call, const AdamWRates* rates, const AdamWTotals* of_all,
                         int ranks, AdamWReport* report);
// rounded = value.
void adamw_round(const AdamWCall& call);

}  // namespace logitless::cuda

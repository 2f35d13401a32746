// AdamW over many tensors on a GPU. No CUDA headers here: a build without CUDA answers every call
// with the reason.
//
// Calls enqueue on a stream; they neither wait nor allocate, and may be captured into a CUDA graph.
// The same operands give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device_head.h"

namespace logitless::cuda {

// f32 [count] each but for `rounded`, aligned to 16 bytes.
struct AdamWTensor {
  float* value = nullptr;
  float* gradient = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  void* rounded = nullptr;  // bf16 [count], of value; null: not wanted
  std::int64_t count = 0;
  bool decay = false;
};

// What a step differs by from the one before, in the device's memory.
struct AdamWRates {
  float move = 0.0f;      // rate / (1 - beta1^step)
  float inverse2 = 0.0f;  // 1 / (1 - beta2^step)
  float kept = 1.0f;      // 1 - rate * weight_decay
  std::int32_t note = 0;  // the caller's, for the report
};

struct AdamWReport {
  double loss = 0.0;
  double norm = 0.0;         // of the gradients before clipping
  std::int64_t skipped = 0;  // 1: this step changed nothing
  std::int64_t note = 0;     // the greatest of all ranks' rates
};

// What a rank adds to a step of several.
struct AdamWTotals {
  double loss = 0.0;
  double squares = 0.0;  // of its gradients
  std::int64_t note = 0;
};

// Where things lie in the optimizer's memory; offsets in bytes, multiples of 256. Pure.
struct AdamWPlaces {
  std::int64_t blocks = 0;  // pieces that tensors are cut into
  std::size_t tensors = 0, cuts = 0, partial = 0, state = 0, end = 0;
};
AdamWPlaces adamw_places(std::span<const std::int64_t> counts);
// What the first `state` bytes of the memory have to hold, for `tensors` of adamw_places' counts.
std::vector<std::byte> adamw_tables(std::span<const AdamWTensor> tensors);

struct AdamWCall {
  AdamWPlaces places;
  void* memory = nullptr;                                        // places.end bytes, aligned to 256
  float beta1 = 0.0f, beta2 = 0.0f, keep1 = 0.0f, keep2 = 0.0f;  // keep: 1 - beta
  float epsilon = 0.0f;
  double clip = 0.0;  // most norm of the gradients; 0: any
  Stream stream = nullptr;
};

// The sum of losses is 0, and no step has been skipped.
void adamw_reset(const AdamWCall& call);
// Sum of losses = *loss, or += with `add`.
void adamw_loss(const AdamWCall& call, const float* loss, bool add);
// The step, and its report: with g = gradient, times clip / norm where the norm is above clip,
//   m = beta1 m + keep1 g     v = beta2 v + keep2 g^2
//   value = (decay ? kept : 1) value - move m / (sqrt(v inverse2) + epsilon)
// in f32, and rounded = value; the norm in double. From a loss or norm on that is no finite number,
// steps change nothing until adamw_reset().
void adamw_step(const AdamWCall& call, const AdamWRates* rates, AdamWReport* report);
// Of several ranks, each with tensors of its own: what this one's are, then the step with the sums
// of all [ranks], in their order.
void adamw_totals(const AdamWCall& call, const AdamWRates* rates, AdamWTotals* totals);
void adamw_step_of_ranks(const AdamWCall& call, const AdamWRates* rates, const AdamWTotals* of_all,
                         int ranks, AdamWReport* report);
// rounded = value.
void adamw_round(const AdamWCall& call);

}  // namespace logitless::cuda

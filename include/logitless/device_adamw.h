// AdamW (Loshchilov & Hutter 2019) over all tensors of a model on a GPU: three kernels a step for
// any number of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "logitless/context.h"
#include "logitless/export.h"

namespace logitless {

struct DeviceAdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double clip = 0.0;  // gradients are scaled down to at most this norm; 0: no clipping
};

// A parameter with its gradient and moments: f32 [count] each except `rounded`, in device memory,
// aligned to 16 bytes.
struct DeviceAdamWTensor {
  float* value = nullptr;
  float* gradient = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  void* rounded = nullptr;  // bf16 [count]: value rounded, updated by each step; null: not wanted
  std::int64_t count = 0;
  bool decay = false;  // by weight_decay
};

// Inputs of a step from the host, in device memory.
struct DeviceAdamWRates {
  float move = 0.0f;          // rate / (1 - beta1^step)
  float inverse2 = 0.0f;      // 1 / (1 - beta2^step)
  float decay_factor = 1.0f;  // 1 - rate * weight_decay
  std::int32_t note = 0;      // the caller's, copied to the report
};

// Report of a step, in device memory.
struct DeviceAdamWReport {
  double loss = 0.0;         // sum over micro-batches
  double norm = 0.0;         // of the gradients before clipping: sqrt of the sum of squares
  std::int64_t skipped = 0;  // 1: the step changed nothing
  std::int64_t note = 0;     // of the rates; over several ranks the maximum
};

// Contribution of one of several ranks to a step in which each has other tensors, or other slices
// of them; in device memory.
struct DeviceAdamWTotals {
  double loss = 0.0;     // sum over its micro-batches
  double squares = 0.0;  // sum over its gradients
  std::int64_t note = 0;
};

// Only the constructor allocates or waits, and everything else may be captured into a graph. The
// same numbers give the same bits: sums have a fixed order, those of squares are in double.
class LOGITLESS_API DeviceAdamW {
 public:
  // Returns the device memory of an optimizer for tensors of these counts: its tables, and a double
  // for each 8192 elements. Pure.
  static std::size_t bytes(std::span<const std::int64_t> counts);

  // Throws InvalidArgument naming a tensor that is not aligned or has no memory; DeviceError.
  DeviceAdamW(const Context& context, const DeviceAdamWOptions& options,
              std::span<const DeviceAdamWTensor> tensors);

  // Returns the rates of the step-th step, counted from 1.
  DeviceAdamWRates rates(std::int64_t step, double rate) const;

  // Enqueue on a cudaStream_t, in this order for each step: the first micro-batch's loss, f32 [];
  // those of the others; then the step. With
  // g = gradient * min(1, clip / norm):
  //   m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g^2
  //   value = (decay ? kept : 1) value - move m / (sqrt(v inverse2) + epsilon)
  // A step whose loss or norm is not finite changes nothing, and neither does any later step until
  // reset().
  void first_loss(const float* loss, void* stream) const;
  void add_loss(const float* loss, void* stream) const;
  void step(const DeviceAdamWRates* rates, DeviceAdamWReport* report, void* stream) const;
  // Replace step() on several ranks: first totals() on each, then the same step on each with the
  // totals of all, in the order of ranks.
  void totals(const DeviceAdamWRates* rates, DeviceAdamWTotals* totals, void* stream) const;
  void step_of_ranks(const DeviceAdamWRates* rates, const DeviceAdamWTotals* of_all, int ranks,
                     DeviceAdamWReport* report, void* stream) const;
  void reset(void* stream) const;
  // Writes all `rounded` from their values, after other code has changed these. Enqueued likewise.
  void round(void* stream) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace logitless

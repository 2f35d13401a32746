// AdamW (Loshchilov & Hutter 2019), gradient clipping, and the learning rate of a step. The same
// bits for any number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace logitless::train {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
};

// One parameter with its gradient and moments: spans of equal size.
struct AdamWSlot {
  std::span<float> value;
  std::span<const float> gradient;
  std::span<float> m, v;
  bool decay = false;  // matrices
};

// For the step-th step, counted from 1, with g = scale * gradient:
//   m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g^2
//   value -= rate (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + decay value)
void adamw_step(const AdamWOptions& options, std::span<const AdamWSlot> slots, std::int64_t step,
                double rate, double scale, int threads);

// In double.
double sum_of_squares(std::span<const std::span<const float>> gradients, int threads);
// Its sqrt.
double global_norm(std::span<const std::span<const float>> gradients, int threads);

// What gradients are multiplied with so that their norm is at most `most`; 1 when `most` is 0.
double clip_scale(double norm, double most);

// Zeros.
void clear(std::span<const std::span<float>> tensors, int threads);

// Linear from peak / warmup to peak over the first `warmup` steps, then half a cosine down to
// `floor` at the last of `steps`.
struct Schedule {
  double peak = 0.0;
  double floor = 0.0;
  std::int64_t warmup = 0;
  std::int64_t steps = 0;

  double rate(std::int64_t step) const;  // step counts from 0
};

}  // namespace logitless::train

// AdamW (Loshchilov & Hutter 2019), gradient clipping and the learning-rate schedule. Results have
// the same bits for any number of threads.
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
  bool decay = false;  // set for matrices
};

// Applies step `step`, counted from 1, with g = scale * gradient:
//   m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g^2
//   value -= rate (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + decay value)
void adamw_step(const AdamWOptions& options, std::span<const AdamWSlot> slots, std::int64_t step,
                double rate, double scale, int threads);

// Returns the sum of squares of all elements, added up in double.
double sum_of_squares(std::span<const std::span<const float>> gradients, int threads);
// Returns the square root of sum_of_squares().
double global_norm(std::span<const std::span<const float>> gradients, int threads);

// Returns the factor that brings gradients of norm `norm` to a norm of at most `most`; 1 when
// `most` is 0.
double clip_scale(double norm, double most);

// Sets all elements to 0.
void clear(std::span<const std::span<float>> tensors, int threads);

// The rate rises linearly from peak / warmup to peak over the first `warmup` steps. It then falls
// along half a cosine to `floor`, which the last of `steps` has.
struct Schedule {
  double peak = 0.0;
  double floor = 0.0;
  std::int64_t warmup = 0;
  std::int64_t steps = 0;

  double rate(std::int64_t step) const;  // step counts from 0
};

}  // namespace logitless::train

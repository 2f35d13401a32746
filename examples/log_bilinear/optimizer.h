// AdamW (Loshchilov and Hutter, 2019) and Adagrad (Duchi et al., 2011) on fp32 master weights.
#pragma once

#include <logitless/memory.h>

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace log_bilinear {

enum class OptimizerKind : std::uint8_t { adamw, adagrad };

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::adamw;
  float beta1 = 0.9f;
  float beta2 = 0.99f;
  float epsilon = 1e-8f;
  float weight_decay = 0.0f;  // decoupled, times the learning rate
};

// Updates row-sparse parameters (separate context vectors) lazily: only rows of the step's tokens
// move, and moments and decay of the others wait. That is exact for Adagrad without decay, and the
// usual approximation for AdamW.
class Optimizer {
 public:
  // Running sums of one parameter, in its shape.
  struct State {
    std::string name;
    const Parameter* parameter;
    logitless::Buffer memory;
    float* data() const { return memory.as<float>(); }
  };

  // The parameters and the meter must outlive the optimiser.
  Optimizer(const OptimizerOptions& options, std::vector<Parameter>& parameters, int threads,
            logitless::MemoryMeter* meter);

  // Moves all parameters by their gradients. `step` counts from 1.
  void step(double learning_rate, std::int64_t step);

  const std::vector<State>& state() const { return state_; }

 private:
  OptimizerOptions options_;
  std::vector<Parameter>& parameters_;
  int threads_;
  std::vector<State> state_;  // AdamW: two in a row for each parameter; Adagrad: one
};

// Learning rate of a step: rises linearly over `warmup` steps, then falls as half a cosine to 0
// after the last of `steps`. `step` counts from 1.
double scheduled_rate(double peak, std::int64_t step, std::int64_t warmup, std::int64_t steps);

}  // namespace log_bilinear

#include "optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "logitless/parallel.h"

namespace log_bilinear {
namespace {

// Calls update(first, count) for ranges of elements, in parallel: whole parameters in blocks,
// sparse ones row by row.
template <typename Update>
void for_each_stretch(const Parameter& parameter, int threads, const Update& update) {
  constexpr std::int64_t kBlock = 1 << 14;
  if (parameter.row_sparse) {
    const auto count = static_cast<std::int64_t>(parameter.touched.size());
    constexpr std::int64_t kRows = 64;
    logitless::parallel_ranges(threads, count, kRows, [&](std::int64_t i, std::int64_t last) {
      for (; i < last; ++i) update(parameter.touched[i] * parameter.columns, parameter.columns);
    });
    return;
  }
  logitless::parallel_ranges(
      threads, parameter.numel(), kBlock,
      [&](std::int64_t first, std::int64_t last) { update(first, last - first); });
}

struct AdamConstants {
  float beta1, beta2, epsilon, rate, root_correction, shrink;
};

void adam_stretch(const AdamConstants& c, std::int64_t count, const float* __restrict__ gradient,
                  float* __restrict__ mean, float* __restrict__ square, float* __restrict__ value) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i];
    mean[i] = c.beta1 * mean[i] + (1.0f - c.beta1) * g;
    square[i] = c.beta2 * square[i] + (1.0f - c.beta2) * g * g;
    value[i] = c.shrink * value[i] -
               c.rate * mean[i] / (std::sqrt(square[i]) * c.root_correction + c.epsilon);
  }
}

void adagrad_stretch(float rate, float epsilon, float shrink, std::int64_t count,
                     const float* __restrict__ gradient, float* __restrict__ square,
                     float* __restrict__ value) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i];
    square[i] += g * g;
    value[i] = shrink * value[i] - rate * g / (std::sqrt(square[i]) + epsilon);
  }
}

}  // namespace

Optimizer::Optimizer(const OptimizerOptions& options, std::vector<Parameter>& parameters,
                     int threads, logitless::MemoryMeter* meter)
    : options_(options), parameters_(parameters), threads_(threads) {
  const bool adam = options.kind == OptimizerKind::adamw;
  const std::vector<const char*> names = adam ? std::vector<const char*>{"mean", "mean_square"}
                                              : std::vector<const char*>{"square_sum"};
  for (const Parameter& parameter : parameters) {
    for (const char* name : names) {
      const std::size_t bytes = static_cast<std::size_t>(parameter.numel()) * sizeof(float);
      state_.push_back({parameter.name + "." + name, &parameter, logitless::Buffer(bytes, meter)});
      std::fill_n(state_.back().data(), parameter.numel(), 0.0f);
    }
  }
}

void Optimizer::step(double learning_rate, std::int64_t step) {
  const auto rate = static_cast<float>(learning_rate);
  const double bias1 = 1.0 - std::pow(static_cast<double>(options_.beta1), step);
  const double bias2 = 1.0 - std::pow(static_cast<double>(options_.beta2), step);
  std::size_t next = 0;
  for (Parameter& parameter : parameters_) {
    const float* gradient = parameter.gradient();
    float* value = parameter.value();
    const float decay = parameter.decayed ? options_.weight_decay : 0.0f;
    const float shrink = 1.0f - rate * decay;
    if (options_.kind == OptimizerKind::adamw) {
      float* mean = state_[next++].data();
      float* square = state_[next++].data();
      const AdamConstants c{options_.beta1,
                            options_.beta2,
                            options_.epsilon,
                            static_cast<float>(learning_rate / bias1),
                            static_cast<float>(1.0 / std::sqrt(bias2)),
                            shrink};
      for_each_stretch(parameter, threads_, [&](std::int64_t at, std::int64_t count) {
        adam_stretch(c, count, gradient + at, mean + at, square + at, value + at);
      });
    } else {
      float* square = state_[next++].data();
      for_each_stretch(parameter, threads_, [&](std::int64_t at, std::int64_t count) {
        adagrad_stretch(rate, options_.epsilon, shrink, count, gradient + at, square + at,
                        value + at);
      });
    }
  }
}

double scheduled_rate(double peak, std::int64_t step, std::int64_t warmup, std::int64_t steps) {
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  const double done = static_cast<double>(step - 1 - warmup) /
                      static_cast<double>(std::max<std::int64_t>(1, steps - warmup));
  return peak * 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(1.0, done)));
}

}  // namespace log_bilinear

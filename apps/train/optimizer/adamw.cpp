#include "train/optimizer/adamw.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "logitless/parallel.h"

namespace logitless::train {
namespace {

constexpr std::size_t kBlock =
    16384;  // elements of a task; sums are cut here, whatever the threads

struct Block {
  std::size_t tensor, begin, end;
};

template <typename Sizes>
std::vector<Block> blocks_of(std::size_t tensors, Sizes&& size) {
  std::vector<Block> blocks;
  for (std::size_t t = 0; t < tensors; ++t) {
    for (std::size_t begin = 0; begin < size(t); begin += kBlock) {
      blocks.push_back({t, begin, std::min(begin + kBlock, size(t))});
    }
  }
  return blocks;
}

template <typename Task>
void each(const std::vector<Block>& blocks, int threads, Task&& task) {
  parallel_for(threads, static_cast<std::int64_t>(blocks.size()),
               [&](std::int64_t i, int) { task(static_cast<std::size_t>(i)); });
}

}  // namespace

void adamw_step(const AdamWOptions& options, std::span<const AdamWSlot> slots, std::int64_t step,
                double rate, double scale, int threads) {
  const auto blocks = blocks_of(slots.size(), [&](std::size_t t) { return slots[t].value.size(); });
  const auto beta1 = static_cast<float>(options.beta1), beta2 = static_cast<float>(options.beta2);
  const auto keep1 = static_cast<float>(1.0 - options.beta1);
  const auto keep2 = static_cast<float>(1.0 - options.beta2);
  const double correction1 = 1.0 - std::pow(options.beta1, static_cast<double>(step));
  const double correction2 = 1.0 - std::pow(options.beta2, static_cast<double>(step));
  const auto gradient_scale = static_cast<float>(scale);
  const auto move = static_cast<float>(rate / correction1);
  const auto inverse2 = static_cast<float>(1.0 / correction2);
  const auto epsilon = static_cast<float>(options.epsilon);
  each(blocks, threads, [&](std::size_t i) {
    const AdamWSlot& slot = slots[blocks[i].tensor];
    const float decay_factor =
        slot.decay ? static_cast<float>(1.0 - rate * options.weight_decay) : 1.0f;
    float* __restrict__ value = slot.value.data();
    float* __restrict__ m = slot.m.data();
    float* __restrict__ v = slot.v.data();
    const float* __restrict__ gradient = slot.gradient.data();
    for (std::size_t at = blocks[i].begin; at < blocks[i].end; ++at) {
      const float g = gradient[at] * gradient_scale;
      m[at] = beta1 * m[at] + keep1 * g;
      v[at] = beta2 * v[at] + keep2 * (g * g);
      value[at] = decay_factor * value[at] - move * m[at] / (std::sqrt(v[at] * inverse2) + epsilon);
    }
  });
}

double sum_of_squares(std::span<const std::span<const float>> gradients, int threads) {
  const auto blocks =
      blocks_of(gradients.size(), [&](std::size_t t) { return gradients[t].size(); });
  std::vector<double> sums(blocks.size());
  each(blocks, threads, [&](std::size_t i) {
    // Lanes of a fixed number, for the compiler to keep in vectors.
    constexpr std::size_t kLanes = 8;
    double lanes[kLanes] = {};
    const float* g = gradients[blocks[i].tensor].data();
    std::size_t at = blocks[i].begin;
    for (; at + kLanes <= blocks[i].end; at += kLanes) {
      for (std::size_t k = 0; k < kLanes; ++k) {
        lanes[k] += static_cast<double>(g[at + k]) * static_cast<double>(g[at + k]);
      }
    }
    for (; at < blocks[i].end; ++at)
      lanes[0] += static_cast<double>(g[at]) * static_cast<double>(g[at]);
    for (const double lane : lanes) sums[i] += lane;
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

double global_norm(std::span<const std::span<const float>> gradients, int threads) {
  return std::sqrt(sum_of_squares(gradients, threads));
}

double clip_scale(double norm, double most) {
  return most > 0.0 && norm > most ? most / norm : 1.0;
}

void clear(std::span<const std::span<float>> tensors, int threads) {
  const auto blocks = blocks_of(tensors.size(), [&](std::size_t t) { return tensors[t].size(); });
  each(blocks, threads, [&](std::size_t i) {
    float* const data = tensors[blocks[i].tensor].data();
    std::fill(data + blocks[i].begin, data + blocks[i].end, 0.0f);
  });
}

double Schedule::rate(std::int64_t step) const {
  if (step < warmup) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  // The last step is steps - 1.
  const std::int64_t span = steps - 1 - warmup;
  const double done =
      span <= 0 ? 1.0
                : std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(span));
  return floor + 0.5 * (peak - floor) * (1.0 + std::cos(std::numbers::pi * done));
}

}  // namespace logitless::train

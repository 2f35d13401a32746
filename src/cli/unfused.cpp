#include "cli/unfused.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "logitless/error.h"
#include "logitless/parallel.h"

// The row loops below are compiled once for each of these targets; the best one is selected when
// the program starts.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define LOGITLESS_CLONES [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#else
#define LOGITLESS_CLONES
#endif

namespace logitless::cli {
namespace {

// Returns exp(x) for x <= 0 to 2 ulp: x = n log 2 + r with |r| <= log(2) / 2, and a polynomial in
// r.
inline float exp_negative(float x) {
  x = std::max(x, -87.0f);
  constexpr float kRound = 12582912.0f;  // adding and subtracting 1.5 * 2^23 rounds to an integer
  const float n = (x * 1.44269504f + kRound) - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
}

// Replaces z by exp(z - max). Returns max and the sum.
struct RowSum {
  float max;
  double sum;
};
LOGITLESS_CLONES RowSum exponentials(float* z, std::int64_t count) {
  constexpr std::int64_t kLanes = 32;
  float top[kLanes];
  std::fill(top, top + kLanes, -INFINITY);
  std::int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) top[l] = z[j + l] > top[l] ? z[j + l] : top[l];
  }
  for (; j < count; ++j) top[0] = std::max(top[0], z[j]);
  const float max = *std::max_element(top, top + kLanes);

  double sum = 0.0;
  constexpr std::int64_t kStretch = 4096;  // longest sum in f32
  for (std::int64_t begin = 0; begin < count; begin += kStretch) {
    const std::int64_t end = std::min(count, begin + kStretch);
    float partial[kLanes] = {};
    for (j = begin; j + kLanes <= end; j += kLanes) {
      for (std::int64_t l = 0; l < kLanes; ++l) {
        const float e = exp_negative(z[j + l] - max);
        z[j + l] = e;
        partial[l] += e;
      }
    }
    for (; j < end; ++j) partial[0] += z[j] = exp_negative(z[j] - max);
    for (const float p : partial) sum += static_cast<double>(p);
  }
  return {max, sum};
}

LOGITLESS_CLONES void scale(float* values, std::int64_t count, float factor) {
  for (std::int64_t j = 0; j < count; ++j) values[j] *= factor;
}

std::int64_t target_at(const ConstTensorView& targets, std::int64_t i) {
  return targets.dtype() == DType::i64 ? static_cast<const std::int64_t*>(targets.data())[i]
                                       : static_cast<const std::int32_t*>(targets.data())[i];
}

const float* as_f32(const ConstTensorView& view, OwnedTensor& copy) {
  if (view.dtype() == DType::f32) return static_cast<const float*>(view.data());
  copy = convert(view, DType::f32);
  return static_cast<const float*>(copy.view.data());
}

OwnedTensor matrix(std::int64_t rows, std::int64_t cols) {
  const std::int64_t shape[] = {rows, cols};
  return make_tensor(DType::f32, shape);
}

// Returns the number in the first line of a file, or `otherwise`.
std::size_t read_number(const std::string& path, std::size_t otherwise) {
  std::ifstream in(path);
  std::size_t number = 0;
  return in >> number ? number : otherwise;
}

}  // namespace

std::size_t unfused_workspace_bytes(const UnfusedSizes& s, bool converts) {
  const std::int64_t inputs = converts ? (s.tokens + s.vocab) * s.dim : 0;
  return static_cast<std::size_t>(s.tokens * s.vocab + inputs) * sizeof(float);
}

double predict_unfused_seconds(const UnfusedSizes& s, int threads) {
  const UnfusedSizes part{std::min<std::int64_t>(s.tokens, 384), s.dim,
                          std::min<std::int64_t>(s.vocab, 3072)};
  const std::int64_t hidden_shape[] = {part.tokens, part.dim};
  const std::int64_t weight_shape[] = {part.vocab, part.dim};
  const OwnedTensor hidden = random_normal(DType::f32, hidden_shape, 1.0, 1);
  const OwnedTensor weight = random_normal(DType::f32, weight_shape, 1.0, 2);
  const OwnedTensor out = matrix(part.tokens, part.vocab);
  double seconds = 0.0;
  for (int i = 0; i < 2; ++i) {  // the first run touches the memory
    const auto start = std::chrono::steady_clock::now();
    gemm(row_major(hidden.memory.as<float>(), part.tokens, part.dim),
         transposed(row_major(weight.memory.as<float>(), part.vocab, part.dim)),
         out.memory.as<float>(), threads);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  const double ratio = static_cast<double>(s.tokens) / static_cast<double>(part.tokens) *
                       static_cast<double>(s.vocab) / static_cast<double>(part.vocab);
  return 3.0 * ratio * seconds;
}

std::size_t available_bytes() {
  std::size_t available = 0;
  std::ifstream in("/proc/meminfo");
  for (std::string name, rest; in >> name; std::getline(in, rest)) {
    std::size_t kib = 0;
    if (name == "MemAvailable:" && in >> kib) available = kib * 1024;
  }
  // A control group may have a lower limit.
  const std::size_t limit = read_number("/sys/fs/cgroup/memory.max", SIZE_MAX);
  const std::size_t used = read_number("/sys/fs/cgroup/memory.current", 0);
  return std::min(available, limit > used ? limit - used : 0);
}

Unfused::Unfused(const ConstTensorView& hidden, const ConstTensorView& weight,
                 const ConstTensorView& targets, std::int64_t ignore_index, int threads)
    : sizes_{hidden.size(0), hidden.size(1), weight.size(0)},
      ignore_index_(ignore_index),
      threads_(threads),
      hidden_(as_f32(hidden, hidden_copy_)),
      weight_(as_f32(weight, weight_copy_)),
      targets_(targets),
      logits_(matrix(sizes_.tokens, sizes_.vocab)),
      d_hidden_(matrix(sizes_.tokens, sizes_.dim)),
      d_weight_(matrix(sizes_.vocab, sizes_.dim)) {
  for (std::int64_t i = 0; i < sizes_.tokens; ++i) {
    const std::int64_t target = target_at(targets_, i);
    if (target != ignore_index_ && (target < 0 || target >= sizes_.vocab)) {
      throw InvalidArgument("targets: " + std::to_string(target) + " at position " +
                            std::to_string(i) + " is not below the vocabulary of " +
                            std::to_string(sizes_.vocab));
    }
  }
}

// Computes the loss. With `gradient` the logits are overwritten by their gradient.
double Unfused::loss(bool gradient) {
  const auto [tokens, dim, vocab] = sizes_;
  auto* logits = static_cast<float*>(logits_.view.data());
  const Matrix hidden = row_major(hidden_, tokens, dim);
  const Matrix weight = row_major(weight_, vocab, dim);
  gemm(hidden, transposed(weight), logits, threads_);

  std::int64_t valid = 0;
  for (std::int64_t i = 0; i < tokens; ++i)
    valid += target_at(targets_, i) != ignore_index_ ? 1 : 0;
  const double share = valid > 0 ? 1.0 / static_cast<double>(valid) : 0.0;
  std::vector<double> losses(static_cast<std::size_t>(tokens), 0.0);
  const std::int64_t vocab_count = vocab;  // Clang 14 cannot capture structured bindings in lambdas
  parallel_for(threads_, tokens, [&](std::int64_t i, int) {
    float* z = logits + i * vocab_count;
    const std::int64_t target = target_at(targets_, i);
    if (target == ignore_index_) {
      std::fill(z, z + vocab_count, 0.0f);
      return;
    }
    const float target_logit = z[target];
    const auto [max, sum] = exponentials(z, vocab_count);
    losses[static_cast<std::size_t>(i)] =
        std::log(sum) + static_cast<double>(max) - static_cast<double>(target_logit);
    if (!gradient) return;
    scale(z, vocab_count,
          static_cast<float>(share / sum));  // now the gradient, except the target's
    z[target] -= static_cast<float>(share);
  });
  double loss = 0.0;
  for (const double each : losses) loss += each;
  return loss * share;
}

double Unfused::run_loss() { return loss(false); }

double Unfused::run() {
  const auto [tokens, dim, vocab] = sizes_;
  const double loss_value = loss(true);
  const Matrix hidden = row_major(hidden_, tokens, dim);
  const Matrix weight = row_major(weight_, vocab, dim);
  const Matrix d_logits = row_major(static_cast<float*>(logits_.view.data()), tokens, vocab);
  gemm(d_logits, weight, static_cast<float*>(d_hidden_.view.data()), threads_);
  gemm(transposed(d_logits), hidden, static_cast<float*>(d_weight_.view.data()), threads_);
  return loss_value;
}

}  // namespace logitless::cli

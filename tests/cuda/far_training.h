// A small synthetic training run on a GPU, for which the far field pays.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "kernels/device/gpu_kernels.h"
#include "kernels/device/kernel.h"
#include "logitless/far_field.h"
#include "support/mirror.h"
#include "support/problem.h"
#include "support/recording.h"

namespace logitless::test {

inline constexpr std::int64_t kTile = 128;

// Returns the first kernel of LOGITLESS_GPU_KERNELS with a far field that runs here, or "".
inline std::string far_kernel() {
  const std::vector<std::string> tested = tested_kernels();
  for (const cuda::DeviceKernel* kernel : cuda::gpu_kernels()) {
    if (kernel->far != nullptr && std::ranges::find(tested, kernel->name) != tested.end())
      return kernel->name;
  }
  return "";
}

// Vocabulary entries in clusters of full tiles, shuffled within a rank; tokens of a few topics.
// Every step moves both a little.
struct Training {
  explicit Training(std::int64_t vocab_wanted = 131072, std::int64_t columns = 128,
                    std::int64_t rows = 2048, double spread = 0.02, std::int64_t ranks = 1,
                    std::int64_t cluster = kTile)
      : vocab(vocab_wanted),
        dim(columns),
        tokens(rows),
        hidden(DType::bf16, {tokens, dim}),
        weight(DType::bf16, {vocab, dim}),
        bias(DType::f32, {vocab}),
        targets(DType::i64, {tokens}),
        loss(DType::f32, {1}),
        lse(DType::f32, {tokens}),
        d_hidden(DType::f32, {tokens, dim}),
        d_weight(DType::f32, {vocab, dim}) {
    std::mt19937_64 random(5);
    std::normal_distribution<double> normal;
    vocab_ids.resize(static_cast<std::size_t>(vocab));
    std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
    for (std::int64_t r = 0; r < ranks; ++r)
      std::shuffle(vocab_ids.begin() + vocab * r / ranks,
                   vocab_ids.begin() + vocab * (r + 1) / ranks, random);
    const double unit = std::sqrt(8.0 / static_cast<double>(dim));
    std::vector<double> center(static_cast<std::size_t>(dim));
    for (std::int64_t at = 0; at < vocab; ++at) {
      for (std::int64_t k = 0; k < dim; ++k) {
        if (at % cluster == 0) center[k] = unit * normal(random);
        weight.set(vocab_ids[at] * dim + k, center[k] + spread * unit * normal(random));
      }
      bias.set(vocab_ids[at], at % 19 == 0 ? -INFINITY : 0.3 * normal(random));
    }
    for (std::int64_t i = 0; i < tokens; ++i) {
      for (std::int64_t k = 0; k < dim; ++k) {
        if (i % (tokens / 4) == 0) center[k] = 1.2 * normal(random);
        hidden.set(i * dim + k, center[k] + 0.1 * normal(random));
      }
      targets.set(i, static_cast<double>(random() % static_cast<std::uint64_t>(vocab)));
    }
  }
  CrossEntropyInputs inputs() const {
    CrossEntropyInputs in;
    in.hidden = hidden.view();
    in.weight = weight.view();
    in.targets = targets.view();
    return in;
  }
  CrossEntropyOutputs outputs() {
    CrossEntropyOutputs out;
    out.loss = TensorView(loss.view().data(), DType::f32, std::span<const std::int64_t>());
    out.lse = lse.view();
    out.d_hidden = d_hidden.view();
    out.d_weight = d_weight.view();
    return out;
  }
  LossStatistics step(FarFieldHead& head, LossStatistics* all = nullptr,
                      const CrossEntropyOptions& options = {}) {
    Mirror mirror(far_kernel());
    const LossStatistics s = head.step(options, mirror.in(inputs()), mirror.out(outputs()));
    if (all != nullptr) *all = head.statistics();
    mirror.finish();
    return s;
  }
  void move(double rate = 0.5) {
    for (std::int64_t i = 0; i < hidden.numel(); ++i)
      hidden.set(i, hidden.get(i) - rate * d_hidden.get(i));
    for (std::int64_t j = 0; j < vocab; j += 7)
      for (std::int64_t k = 0; k < dim; ++k)
        weight.set(j * dim + k, weight.get(j * dim + k) - rate * d_weight.get(j * dim + k));
  }
  // Swaps vocabulary entries, so that an earlier order is useless.
  void shake() {
    for (std::int64_t j = 0; j < vocab / 2; ++j) {
      for (std::int64_t k = 0; k < dim; ++k) {
        const std::int64_t a = j * dim + k, b = (vocab - 1 - j) * dim + k;
        const double v = weight.get(a);
        weight.set(a, weight.get(b));
        weight.set(b, v);
      }
    }
  }
  std::vector<std::vector<std::byte>> results() const {
    record("results", d_hidden.bytes());
    record("results", d_weight.bytes());
    return {loss.bytes(), lse.bytes(), d_hidden.bytes(), d_weight.bytes()};
  }
  // Returns the results of the exact plan.
  Training dense() const {
    Training copy = *this;
    const Context context = make_context(far_kernel());
    PlanRequest request;
    request.device = context.device();
    Mirror mirror(far_kernel());
    const CrossEntropyInputs in = mirror.in(copy.inputs());
    const CrossEntropyOutputs out = mirror.out(copy.outputs());
    const LossPlan plan = plan_cross_entropy({}, in, out, request);
    cross_entropy(context, plan, {}, in, out, Workspace(context, plan));
    mirror.finish();
    return copy;
  }

  std::int64_t vocab, dim, tokens;
  std::vector<std::int64_t> vocab_ids;  // token ids, cluster by cluster
  Tensor hidden, weight, bias, targets, loss, lse, d_hidden, d_weight;
};

inline FarFieldOptions quick(Accuracy accuracy) {
  FarFieldOptions o;
  o.accuracy = accuracy;
  o.error = 0.1;
  o.audit_rows = 100;
  o.audit_every = 3;
  o.refresh_every = 5;
  o.refresh_delay = 3;
  o.sample_rows = 1024;
  return o;
}

}  // namespace logitless::test

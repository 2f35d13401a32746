// A small synthetic training run under a FarFieldHead that gains from the far field.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "logitless/far_field.h"
#include "support/common_kernel.h"
#include "support/recording.h"

namespace logitless::test {

// Vocabulary entries in shuffled clusters, and tokens of a few topics; every step moves both
// slightly.
struct Training {
  explicit Training(std::int64_t vocab_wanted = 65536)
      : vocab(vocab_wanted), weight(vocab * kDim), d_weight(vocab * kDim) {
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    std::vector<std::int64_t> vocab_ids(vocab);
    for (std::int64_t j = 0; j < vocab; ++j) vocab_ids[j] = j;
    std::shuffle(vocab_ids.begin(), vocab_ids.end(), random);
    float center[kDim];
    for (std::int64_t at = 0; at < vocab; ++at) {
      for (std::int64_t k = 0; k < kDim; ++k) {
        if (at % 128 == 0) center[k] = normal(random);
        weight[vocab_ids[at] * kDim + k] = center[k] + 0.1f * normal(random);
      }
    }
    for (std::int64_t i = 0; i < kTokens; ++i) {
      for (std::int64_t k = 0; k < kDim; ++k) {
        if (i % (kTokens / 4) == 0) center[k] = 1.2f * normal(random);
        hidden.push_back(center[k] + 0.2f * normal(random));
      }
      targets.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(vocab)));
    }
  }
  CrossEntropyInputs inputs() const {
    CrossEntropyInputs in;
    in.hidden = ConstTensorView(hidden.data(), DType::f32, {kTokens, kDim});
    in.weight = ConstTensorView(weight.data(), DType::f32, {vocab, kDim});
    in.targets = ConstTensorView(targets.data(), DType::i64, {kTokens});
    return in;
  }
  CrossEntropyOutputs outputs() {
    CrossEntropyOutputs out;
    out.loss = TensorView(&loss, DType::f32, std::span<const std::int64_t>());
    out.lse = TensorView(lse.data(), DType::f32, {kTokens});
    out.d_hidden = TensorView(d_hidden.data(), DType::f32, {kTokens, kDim});
    out.d_weight = TensorView(d_weight.data(), DType::f32, {vocab, kDim});
    return out;
  }
  LossStatistics step(FarFieldHead& head, const CrossEntropyOptions& options = {}) {
    return head.step(options, inputs(), outputs());
  }
  void move(float rate = 0.5f) {
    for (std::size_t i = 0; i < weight.size(); ++i) weight[i] -= rate * d_weight[i];
    for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] -= rate * d_hidden[i];
  }
  // Exchanges the rows, so that an earlier order is worthless.
  void shake() { std::reverse(weight.begin(), weight.end()); }
  // Returns all outputs of the last step.
  std::vector<float> results() const {
    std::vector<float> all = {loss};
    for (const auto* v : {&lse, &d_hidden, &d_weight}) all.insert(all.end(), v->begin(), v->end());
    record("results", std::as_bytes(std::span(all)));
    return all;
  }
  // Returns the results of the exact plan.
  std::vector<float> dense(const Context& context) const {
    Training copy = *this;
    PlanRequest request;
    request.device = context.device();
    const LossPlan plan = plan_cross_entropy({}, copy.inputs(), copy.outputs(), request);
    cross_entropy(context, plan, {}, copy.inputs(), copy.outputs(), Workspace(context, plan));
    return copy.results();
  }

  static constexpr std::int64_t kTokens = 128, kDim = 8;
  std::int64_t vocab;
  std::vector<float> weight, hidden, d_weight;
  std::vector<float> lse = std::vector<float>(kTokens),
                     d_hidden = std::vector<float>(kTokens * kDim);
  std::vector<std::int64_t> targets;
  float loss = 0;
};

// Returns a context with one thread, except in tests of threads: threads of a busy machine wait for
// each other.
inline Context context_of(int threads = 1) {
  ContextOptions options;
  options.threads = threads;
  options.kernel = common_kernel();
  return Context(options);
}

inline FarFieldOptions quick(Accuracy accuracy = Accuracy::far_backward) {
  FarFieldOptions o;
  o.accuracy = accuracy;
  o.error = 0.05;
  o.audit_rows = 1000;
  o.audit_every = 3;
  o.refresh_every = 5;
  o.refresh_delay = 3;
  o.sample_rows = 128;
  return o;
}

inline bool far_step(const LossStatistics& s) { return s.far.passes > 0.0; }
inline bool audited(const LossStatistics& s) { return s.far.audited_error >= 0.0; }

inline void expect_same(const FarFieldReport& a, const FarFieldReport& b) {
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.dense_steps, b.dense_steps);
  EXPECT_EQ(a.audits, b.audits);
  EXPECT_EQ(a.refreshes, b.refreshes);
  EXPECT_EQ(a.last_error, b.last_error);
  EXPECT_EQ(a.worst_accepted_error, b.worst_accepted_error);
  EXPECT_EQ(a.tau, b.tau);
  EXPECT_EQ(a.mean_selected, b.mean_selected);
  EXPECT_EQ(a.far, b.far);
}

}  // namespace logitless::test

// More logits than 32 bits count, with results in closed form: hidden and weight have few values,
// so the softmax has a handful of distinct terms.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "support/problem.h"

namespace logitless::test {
namespace {

constexpr int kKinds = 8;

struct Closed {
  // One column; token i has x[i % 8], vocabulary entry j has w[j % 8].
  Closed(std::int64_t tokens, std::int64_t vocab, DType dtype)
      : hidden(dtype, {tokens, 1}), weight(dtype, {vocab, 1}), targets(DType::i32, {tokens}) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      hidden.set(i, x(i % kKinds));
      targets.set(i, static_cast<double>((i * 40503) % vocab));
    }
    for (std::int64_t j = 0; j < vocab; ++j) weight.set(j, w(j % kKinds));
  }
  static double x(std::int64_t kind) { return 0.5 * static_cast<double>(kind) - 1.5; }
  static double w(std::int64_t kind) { return 0.25 * static_cast<double>(kind) - 0.75; }
  Tensor hidden, weight, targets;
};

void expect_closed_form(std::int64_t tokens, std::int64_t vocab, bool gradients) {
  ASSERT_GT(tokens * vocab, std::int64_t{1} << 31);
  ASSERT_EQ(vocab % kKinds, 0);
  Closed problem(tokens, vocab, DType::bf16);
  CrossEntropyInputs in;
  in.hidden = std::as_const(problem.hidden).view();
  in.weight = std::as_const(problem.weight).view();
  in.targets = std::as_const(problem.targets).view();
  Tensor loss(DType::f32, {}), lse(DType::f32, {tokens}), d_hidden(DType::f32, {tokens, 1});
  Tensor d_weight(DType::f32, {vocab, 1});
  CrossEntropyOutputs out;
  out.loss = loss.view();
  out.lse = lse.view();
  if (gradients) {
    out.d_hidden = d_hidden.view();
    out.d_weight = d_weight.view();
  }
  CrossEntropyOptions options;
  options.reduction = Reduction::sum;
  cross_entropy(Context(), options, in, out);

  double expected[kKinds], mean[kKinds], probability[kKinds][kKinds];
  for (int a = 0; a < kKinds; ++a) {
    double sum = 0, first = 0;
    for (int b = 0; b < kKinds; ++b) sum += std::exp(Closed::x(a) * Closed::w(b));
    sum *= static_cast<double>(vocab) / kKinds;
    for (int b = 0; b < kKinds; ++b) {
      probability[a][b] = std::exp(Closed::x(a) * Closed::w(b)) / sum;
      first += probability[a][b] * Closed::w(b) * static_cast<double>(vocab) / kKinds;
    }
    expected[a] = std::log(sum);
    mean[a] = first;
  }
  double total = 0;
  double worst_lse = 0, worst_hidden = 0;
  std::vector<double> by_vocab_id(static_cast<std::size_t>(vocab), 0.0);
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t kind = i % kKinds;
    const auto target = static_cast<std::int64_t>(problem.targets.get(i));
    const double target_w = Closed::w(target % kKinds);
    total += expected[kind] - Closed::x(kind) * target_w;
    worst_lse = std::max(worst_lse, std::abs(lse.get(i) - expected[kind]));
    by_vocab_id[static_cast<std::size_t>(target)] -= Closed::x(kind);
    if (gradients) {
      worst_hidden = std::max(worst_hidden, std::abs(d_hidden.get(i) - (mean[kind] - target_w)));
    }
  }
  EXPECT_NEAR(loss.get(0) / total, 1.0, 2e-6);
  EXPECT_LE(worst_lse, 1e-5);
  if (!gradients) return;
  EXPECT_LE(worst_hidden, 4e-3);
  for (std::int64_t j = 0; j < vocab; ++j) {
    for (int a = 0; a < kKinds; ++a) {
      const std::int64_t of_kind = tokens / kKinds + (a < tokens % kKinds ? 1 : 0);
      by_vocab_id[j] += static_cast<double>(of_kind) * Closed::x(a) * probability[a][j % kKinds];
    }
  }
  EXPECT_LE(relative_error(d_weight.values(), by_vocab_id), 4e-3);
}

TEST(Large, ManyTokens) { expect_closed_form(70001, 32768, true); }
TEST(Large, LargeVocab) { expect_closed_form(129, 17 << 20, false); }

}  // namespace
}  // namespace logitless::test

// The oracle's gradients, proven by central differences in float64 for each option and each pair of
// options. kernel_test then compares every kernel with the oracle over the same pairs.
#include <gtest/gtest.h>

#include <cmath>

#include "support/problem.h"

namespace logitless::test {
namespace {

double loss_of(const OracleProblem& p, const std::vector<double>& upstream) {
  const OracleLogits logits = oracle_logits(p);
  double total = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i)
    total += upstream[i] * oracle_token_loss(p, i, logits.z.data() + i * p.vocab);
  return total;
}

void expect_differences(OracleProblem p) {
  std::vector<double> upstream;
  for (std::int64_t i = 0; i < p.tokens; ++i)
    upstream.push_back(0.7 + 0.3 * static_cast<double>(i));
  const OracleGradients g = oracle_gradients(p, upstream);
  const auto check = [&](std::vector<double>& values, const std::vector<double>& gradient,
                         const char* name) {
    for (std::size_t at = 0; at < values.size(); ++at) {
      constexpr double kStep = 1e-5;
      const double value = values[at];
      values[at] = value + kStep;
      const double up = loss_of(p, upstream);
      values[at] = value - kStep;
      const double down = loss_of(p, upstream);
      values[at] = value;
      EXPECT_NEAR((up - down) / (2 * kStep), gradient[at], 1e-8) << name << "[" << at << "]";
    }
  };
  check(p.hidden, g.d_hidden, "hidden");
  check(p.weight, g.d_weight, "weight");
  if (!p.bias.empty()) check(p.bias, g.d_bias, "bias");
}

TEST(Oracle, GradientsAreThoseOfFiniteDifferences) {
  const std::vector<void (*)(HeadSpec&)> changes = {
      [](HeadSpec&) {},
      [](HeadSpec& s) { s.bias = true; },
      [](HeadSpec& s) { s.label_smoothing = 0.3f; },
      [](HeadSpec& s) { s.z_loss = 0.05f; },
      [](HeadSpec& s) { s.softcap = 1.5f; },
      [](HeadSpec& s) { s.logit_scale = -1.7f; },
      [](HeadSpec& s) { s.class_weight = true; },
      [](HeadSpec& s) { s.token_weight = true; },
      [](HeadSpec& s) { s.ignored = 0.5; },
      [](HeadSpec& s) { s.per_token = 3; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    for (std::size_t j = i; j < changes.size(); ++j) {
      HeadSpec spec;
      spec.tokens = 4;
      spec.dim = 3;
      spec.vocab = 6;
      spec.weight_scale = 2.0;
      spec.seed = 10 * i + j;
      changes[i](spec);
      changes[j](spec);
      SCOPED_TRACE(describe(spec));
      expect_differences(HeadProblem(spec).oracle);
    }
  }
}

// Numbers that can be checked by hand: logits 0 and log 3, so p = 1/4 and 3/4.
TEST(Oracle, ByHand) {
  OracleProblem p;
  p.tokens = 1;
  p.dim = 1;
  p.vocab = 2;
  p.hidden = {1.0};
  p.weight = {0.0, std::log(3.0)};
  p.targets = {0};
  const OracleLogits logits = oracle_logits(p);
  EXPECT_DOUBLE_EQ(logits.lse[0], std::log(4.0));
  EXPECT_DOUBLE_EQ(oracle_token_loss(p, 0, logits.z.data()), std::log(4.0));
  const OracleGradients g = oracle_gradients(p, {1.0});
  EXPECT_NEAR(g.d_weight[0], -0.75, 1e-15);
  EXPECT_NEAR(g.d_weight[1], 0.75, 1e-15);
  EXPECT_NEAR(g.d_hidden[0], 0.75 * std::log(3.0), 1e-15);
}

}  // namespace
}  // namespace logitless::test

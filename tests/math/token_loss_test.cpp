// Tests of the loss of a token: derivatives by differences, times the upstream gradient. The tests
// of kernels and of the C ABI compare its value with float64.
#include "math/token_loss.h"

#include <gtest/gtest.h>

#include <cmath>

namespace logitless {
namespace {

struct Token {
  double lse = 1.75;
  double z[2] = {0.5, -1.25};
  double weighted_sum = 2.5;
};

struct Result {
  double loss;
  double by_lse;
  double by_z[2];
  double by_sum = 0.0;
};

Result result(const Token& t, const LossTerms& terms, double weight, double upstream) {
  TokenLoss loss(terms, weight, upstream);
  Result a{};
  for (int k = 0; k < 2; ++k) a.by_z[k] = loss.add_target(1.5, 0.5 + k, t.z[k] - t.lse);
  if (loss.smooths()) a.by_sum = loss.add_smoothing(t.lse, t.weighted_sum, 11.0, 10.0);
  a.by_lse = loss.add_lse(t.lse);
  a.loss = loss.value();
  return a;
}

double difference(double Token::*number, const LossTerms& terms) {
  const double step = 1e-5;
  Token up, down;
  up.*number += step;
  down.*number -= step;
  return (result(up, terms, 0.75, 1.0).loss - result(down, terms, 0.75, 1.0).loss) / (2 * step);
}

TEST(TokenLoss, DerivativesAreThoseOfTheValue) {
  for (const LossTerms& terms : {LossTerms{}, LossTerms{0.1, 0.0}, LossTerms{0.3, 0.02}}) {
    const Result a = result({}, terms, 0.75, -3.0);
    EXPECT_NEAR(a.by_lse, -3.0 * difference(&Token::lse, terms), 1e-8);
    EXPECT_NEAR(a.by_sum, -3.0 * difference(&Token::weighted_sum, terms), 1e-8);
    for (int k = 0; k < 2; ++k) {
      Token up, down;
      up.z[k] += 1e-5;
      down.z[k] -= 1e-5;
      const double change = result(up, terms, 0.75, 1.0).loss - result(down, terms, 0.75, 1.0).loss;
      EXPECT_NEAR(a.by_z[k], -3.0 * change / 2e-5, 1e-8);
    }
  }
}

TEST(TokenLoss, WithoutWeightThereIsNoLoss) {
  Token infinite;
  infinite.lse = INFINITY;
  EXPECT_EQ(result(infinite, {0.1, 0.1}, 0.0, 1.0).loss, 0.0);
  TokenLoss loss({}, 1.0, 1.0);
  EXPECT_EQ(loss.add_target(0.0, 1.0, -INFINITY), 0.0);
  EXPECT_EQ(loss.value(), 0.0);
}

}  // namespace
}  // namespace logitless

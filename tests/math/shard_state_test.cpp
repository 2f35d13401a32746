#include "math/shard_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace logitless::test {
namespace {

// Returns the state of the logits [begin, end).
ShardState state_of(const std::vector<double>& z, const std::vector<double>& logit_weights,
                    int begin, int end) {
  ShardState s;
  double top = -INFINITY;
  for (int j = begin; j < end; ++j) {
    s.weighted += logit_weights[j] * z[j];
    if (z[j] > top) {
      top = z[j];
      s.vocab_id = j;
    }
  }
  s.best = static_cast<float>(top);
  if (!std::isfinite(top)) return s;
  const double exponent = static_cast<float>(std::ceil(top * kLog2E));
  double sum = 0.0;
  for (int j = begin; j < end; ++j) {
    const double bits = z[j] * kLog2E - exponent;
    const double e = std::exp2(bits);
    sum += e;
    if (e != 0.0) s.entropy += e * bits;
  }
  s.exponent = static_cast<float>(exponent);
  s.sum = static_cast<float>(sum);
  return s;
}

struct Exact {
  explicit Exact(const std::vector<double>& z) {
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0.0, expected = 0.0, squares = 0.0;
    for (const double v : z) {
      const double e = std::exp(v - top);
      sum += e;
      if (!std::isfinite(v)) continue;
      expected += e * (v - top);
      squares += e * (v - top) * (v - top);
    }
    lse = top + std::log(sum);
    entropy = std::log(sum) - expected / sum;
    variance = squares / sum - expected / sum * (expected / sum);
  }
  double lse, entropy, variance;  // variance of z
};

TEST(ShardState, MergesToTheWhole) {
  std::mt19937 random(5);
  for (const double shift : {0.0, -1e4, 1e4, 3e8}) {
    for (const double scale : {0.1, 3.0, 200.0}) {
      std::normal_distribution<double> normal(shift, scale);
      std::uniform_real_distribution<double> weight(0.0, 2.0);
      const int vocab = 600;
      std::vector<double> z, logit_weights;
      for (int j = 0; j < vocab; ++j) {
        z.push_back(static_cast<float>(normal(random)));
        logit_weights.push_back(weight(random));
      }
      const Exact exact(z);
      double weighted = 0.0;
      for (int j = 0; j < vocab; ++j) weighted += logit_weights[j] * z[j];
      const int best = static_cast<int>(std::max_element(z.begin(), z.end()) - z.begin());
      for (const std::vector<int>& borders :
           {std::vector<int>{0, 600}, {0, 300, 600}, {0, 1, 1, 600}, {0, 0, 257, 590, 600}}) {
        std::vector<ShardState> states;
        for (std::size_t r = 0; r + 1 < borders.size(); ++r)
          states.push_back(state_of(z, logit_weights, borders[r], borders[r + 1]));
        const MergedState all = merge_shards(static_cast<int>(states.size()),
                                             [&](int r) -> const ShardState& { return states[r]; });
        const double size = 1.0 + std::abs(exact.lse);
        // The sum of a shard is rounded to fp32, 2^-24 of it. Exponentials are of z (1 - 1.34e-8):
        // kLog2E is that far from log2 e. The derivative of lse by this factor is the entropy, and
        // that of the entropy the variance.
        EXPECT_NEAR(all.lse(), exact.lse, 0x1p-24 + 1.4e-8 * exact.entropy + 1e-15 * size);
        EXPECT_NEAR(entropy_of(all.sum, all.entropy / all.sum), exact.entropy,
                    0x1p-24 * (1.0 + std::log(vocab)) + 1.4e-8 * exact.variance + 1e-15 * size);
        EXPECT_NEAR(all.weighted, weighted, 1e-12 * vocab * size);
        EXPECT_EQ(all.vocab_id, best);
      }
    }
  }
}

TEST(ShardState, TheLowestIdAmongEquals) {
  ShardState high, low;
  high.sum = low.sum = 1.0f;
  high.best = low.best = 3.0f;
  high.vocab_id = 900;
  low.vocab_id = 17;
  for (const bool turned : {false, true}) {
    const MergedState all = merge_shards(
        2, [&](int r) -> const ShardState& { return (r == 0) == turned ? low : high; });
    EXPECT_EQ(all.vocab_id, 17);
    EXPECT_EQ(all.sum, 2.0);
  }
}

TEST(ShardState, RanksWithoutVocabOrWithMaskedOnesAddNothing) {
  ShardState some;
  some.exponent = -40000.0f;
  some.sum = 1.25f;
  some.entropy = -3.0;
  some.best = -1e5f;
  some.vocab_id = 4;
  ShardState masked;
  masked.vocab_id = 0;
  const ShardState none;
  const ShardState* const states[] = {&none, &some, &masked};
  const MergedState all = merge_shards(3, [&](int r) -> const ShardState& { return *states[r]; });
  EXPECT_EQ(all.exponent, -40000.0);
  EXPECT_EQ(all.sum, 1.25);
  EXPECT_EQ(all.entropy, -3.0);
  EXPECT_EQ(all.vocab_id, 4);
  const MergedState nothing = merge_shards(1, [&](int) -> const ShardState& { return masked; });
  EXPECT_EQ(nothing.lse(), -INFINITY);
  EXPECT_EQ(nothing.vocab_id, 0);
}

TEST(ShardState, InfinityOnOneRankIsInfinite) {
  ShardState good, infinite;
  good.sum = 1.0f;
  good.exponent = 7.0f;
  infinite.sum = INFINITY;
  infinite.exponent = kMostExponent;
  for (const int both : {0, 1, 2}) {
    const auto state = [&](int r) -> const ShardState& {
      return both == 2 || r == both ? infinite : good;
    };
    EXPECT_EQ(merge_shards(2, state).lse(), INFINITY);
    ShardState all = state(0);
    merge_into(all, state(1));
    EXPECT_EQ(value(LseState{all.exponent, all.sum}), INFINITY);
    EXPECT_EQ(value(merge({state(0).exponent, state(0).sum}, {state(1).exponent, state(1).sum})),
              INFINITY);
  }
}

TEST(ShardState, NaNOnOneRankIsNaN) {
  ShardState good, bad;
  good.sum = 1.0f;
  bad.sum = bad.exponent = NAN;
  for (const bool turned : {false, true}) {
    const MergedState all = merge_shards(
        2, [&](int r) -> const ShardState& { return (r == 0) == turned ? bad : good; });
    EXPECT_TRUE(std::isnan(all.lse()));
  }
}

}  // namespace
}  // namespace logitless::test

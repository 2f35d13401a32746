#include "math/split_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "core/half.h"

namespace logitless::test {
namespace {

float there_and_back(float sum) { return join_sum(split_high(sum), split_low(sum)); }

TEST(SplitSum, IsOffByLessThanABitOfSixteenAndByNothingInTheMean) {
  std::mt19937 random(3);
  double error = 0.0, square = 0.0;
  int count = 0;
  for (int i = 0; i < 1000000; ++i) {
    const auto sum = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isfinite(sum) || std::abs(sum) < 1e-37f) continue;
    const double off = (static_cast<double>(there_and_back(sum)) - sum) / sum;
    ASSERT_LT(std::abs(off), std::ldexp(1.0, -15)) << sum;
    error += off;
    square += off * off;
    ++count;
  }
  EXPECT_LT(std::sqrt(square / count), std::ldexp(1.0, -16));
  EXPECT_LT(std::abs(error / count), std::ldexp(1.0, -24));
}

TEST(SplitSum, KeepsWhatABf16Is) {
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    const float value = bf16_to_float(static_cast<std::uint16_t>(high));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(there_and_back(value)), high << 16);
  }
}

// NaN of an x86 processor's and of a GPU's arithmetic, and infinities.
TEST(SplitSum, KeepsWhatIsNoNumber) {
  for (const std::uint32_t bits : {0x7fffffffu, 0x7fc00000u, 0xffc00000u})
    EXPECT_TRUE(std::isnan(there_and_back(std::bit_cast<float>(bits)))) << bits;
  EXPECT_EQ(there_and_back(INFINITY), INFINITY);
  EXPECT_EQ(there_and_back(-INFINITY), -INFINITY);
}

}  // namespace
}  // namespace logitless::test

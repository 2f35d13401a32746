#include "math/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace logitless::test {
namespace {

struct Term {
  double value, exponent;
};

// Returns terms like those of vocabulary tiles: fp32 sums, and exponents over `bits` bits.
std::vector<Term> random_terms(int count, double bits, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> share(0.0, 128.0), place(-bits, bits);
  std::vector<Term> terms;
  for (int i = 0; i < count; ++i)
    terms.push_back({static_cast<float>(share(random)), std::round(place(random))});
  return terms;
}

ExactSum sum_of(const std::vector<Term>& terms, std::size_t begin, std::size_t end) {
  ExactSum sum;
  for (std::size_t i = begin; i < end; ++i) sum.add(terms[i].value, terms[i].exponent);
  return sum;
}

bool same_bits(const ExactSum& a, const ExactSum& b) {
  return std::memcmp(&a, &b, sizeof(ExactSum)) == 0;
}

TEST(ExactSum, IsExactToTheRoundingOfADouble) {
  for (const double bits : {0.0, 3.0, 30.0, 100.0}) {
    const std::vector<Term> terms = random_terms(5000, bits, 7);
    long double exact = 0.0L;  // 64 bits of mantissa, the largest first
    std::vector<Term> ordered = terms;
    std::sort(ordered.begin(), ordered.end(), [](const Term& a, const Term& b) {
      return std::ldexp(a.value, static_cast<int>(a.exponent)) <
             std::ldexp(b.value, static_cast<int>(b.exponent));
    });
    for (const Term& t : ordered)
      exact += std::ldexp(static_cast<long double>(t.value), static_cast<int>(t.exponent));
    const double got = sum_of(terms, 0, terms.size()).scaled(0.0);
    EXPECT_LE(std::abs(static_cast<double>((got - exact) / exact)), 4e-16) << bits;
  }
}

// Random orders, and groups as on ranks, which a running maximum with truncation would not survive.
TEST(ExactSum, OrderAndGroupingDoNotChangeABit) {
  std::mt19937 random(11);
  for (const double bits : {2.0, 63.0, 64.0, 65.0, 130.0, 1e9}) {
    std::vector<Term> terms = random_terms(800, bits, static_cast<std::uint32_t>(bits));
    const ExactSum all = sum_of(terms, 0, terms.size());
    for (int run = 0; run < 50; ++run) {
      std::shuffle(terms.begin(), terms.end(), random);
      ExactSum grouped;
      for (std::size_t first = 0; first < terms.size();) {
        const std::size_t end = std::min(terms.size(), first + random() % 300);
        grouped.add(sum_of(terms, first, end));
        first = end;
      }
      ASSERT_TRUE(same_bits(grouped, all)) << bits;
    }
  }
}

TEST(ExactSum, CarriesAreKept) {
  // Adds the largest number of a bin 2^20 times, beside one in the bin above.
  ExactSum sum;
  constexpr int kCount = 1 << 20;
  const double most = 0x1p53 - 1;
  for (int i = 0; i < kCount; ++i) sum.add(most, 11.0);
  EXPECT_EQ(sum.scaled(31.0), most);
  ExactSum above;
  above.add(1.0, 64.0);
  ExactSum first = above;
  first.add(sum);
  sum.add(above);
  EXPECT_TRUE(same_bits(first, sum));
  EXPECT_EQ(sum.scaled(0.0), 0x1p31 * most + 0x1p64);
}

TEST(ExactSum, WhatLiesFarBelowIsDroppedAndNothingElse) {
  ExactSum sum;
  sum.add(1.0, 0.0);
  sum.add(1.0, -64.0);  // the last bit of the bin below
  sum.add(1.0, -65.0);
  ExactSum expected;
  expected.add(1.0, -64.0);
  expected.add(1.0, 0.0);
  EXPECT_TRUE(same_bits(sum, expected));
}

TEST(ExactSum, ExponentsOfAnySize) {
  for (const double far : {-0x1p30, 0x1p30}) {
    ExactSum sum;
    sum.add(1.5, far);
    sum.add(0.25, far);
    EXPECT_EQ(sum.scaled(far), 1.75);
  }
  ExactSum both;
  both.add(1.5, -0x1p30);
  both.add(1.5, 0x1p30);
  EXPECT_EQ(both.scaled(0x1p30), 1.5);
  EXPECT_EQ(both.scaled(-0x1p30), std::numeric_limits<double>::infinity());
}

TEST(ExactSum, NothingIsNothing) {
  ExactSum sum;
  EXPECT_TRUE(sum.empty());
  EXPECT_EQ(sum.scaled(5.0), 0.0);
  sum.add(0.0, 1e6);
  sum.add(ExactSum());
  EXPECT_TRUE(sum.empty());
  sum.add(2.0, 3.0);
  const ExactSum before = sum;
  sum.add(0.0, 1e6);
  sum.add(ExactSum());
  EXPECT_TRUE(same_bits(sum, before));
}

// Returns 1 + bad, to which other numbers are added before and after.
ExactSum with(double bad) {
  ExactSum sum;
  sum.add(1.0, 0.0);
  ExactSum other;
  other.add(bad, 0.0);
  other.add(1.0, 0.0);
  sum.add(other);
  sum.add(1.0, 200.0);
  return sum;
}

TEST(ExactSum, NoNumberStaysNone) {
  EXPECT_TRUE(std::isnan(with(NAN).scaled(0.0)));
  ExactSum sum;
  sum.add(1.0, std::nan(""));
  EXPECT_TRUE(std::isnan(sum.scaled(0.0)));
}

TEST(ExactSum, InfinityStaysUnlessThereIsNaN) {
  for (const double exponent : {-5000.0, 0.0, 0x1p30}) {
    ExactSum sum = with(INFINITY);
    EXPECT_EQ(sum.scaled(exponent), INFINITY);
    sum.add(with(INFINITY));
    EXPECT_EQ(sum.scaled(exponent), INFINITY);
    ExactSum nan = with(NAN);
    nan.add(sum);
    EXPECT_TRUE(std::isnan(nan.scaled(exponent)));
    sum.add(with(NAN));
    EXPECT_TRUE(std::isnan(sum.scaled(exponent)));
    sum.add(INFINITY, 0.0);
    EXPECT_TRUE(std::isnan(sum.scaled(exponent)));
  }
}

}  // namespace
}  // namespace logitless::test

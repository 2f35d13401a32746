#include "core/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "core/element.h"

namespace logitless {
namespace {

// A 16-bit format by its parameters, for oracles that share nothing with the integer arithmetic
// under test.
struct Format {
  const char* name;
  int fraction_bits;
  int exponent_bits;
  float (*decode)(std::uint16_t);
  std::uint16_t (*encode)(float);

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int least_exponent() const { return 1 - bias(); }  // for normal numbers
};
constexpr Format kFormats[] = {{"bf16", 7, 8, bf16_to_float, float_to_bf16},
                               {"f16", 10, 5, f16_to_float, float_to_f16}};

double decode_oracle(const Format& format, std::uint16_t bits) {
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int exponent = (bits >> format.fraction_bits) & ((1 << format.exponent_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return fraction == 0 ? sign * INFINITY : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0)
    return sign * std::ldexp(fraction, format.least_exponent() - format.fraction_bits);
  return sign * std::ldexp((1 << format.fraction_bits) + fraction,
                           exponent - format.bias() - format.fraction_bits);
}

// Returns the nearest number of the format, ties to even, infinity past the largest. It is exact: a
// double holds any float, and nearbyint rounds ties to even.
double round_oracle(const Format& format, float value) {
  if (!std::isfinite(value) || value == 0.0f) return value;
  const int exponent = std::max(std::ilogb(value), format.least_exponent());
  const double quantum = std::ldexp(1.0, exponent - format.fraction_bits);
  const double rounded = std::nearbyint(value / quantum) * quantum;
  return std::fabs(rounded) >= std::ldexp(1.0, format.bias() + 1) ? std::copysign(INFINITY, value)
                                                                  : rounded;
}

// Reports only the first few mismatches.
class Half : public testing::TestWithParam<Format> {
 protected:
  void expect_rounded(float value) {
    const std::uint16_t bits = GetParam().encode(value);
    const double actual = decode_oracle(GetParam(), bits);
    const double expected = round_oracle(GetParam(), value);
    const bool same = std::isnan(expected)
                          ? std::isnan(actual)
                          : actual == expected && std::signbit(actual) == std::signbit(expected);
    if (!same && ++mismatches_ <= 5) {
      ADD_FAILURE() << GetParam().name << ": " << std::hexfloat << value << " became " << actual
                    << ", expected " << expected;
    }
  }

 private:
  int mismatches_ = 0;
};

TEST_P(Half, EveryPatternDecodesToItsValue) {
  for (int i = 0; i < 0x10000; ++i) {
    const std::uint16_t bits = static_cast<std::uint16_t>(i);
    const float actual = GetParam().decode(bits);
    const double expected = decode_oracle(GetParam(), bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << i;
    } else {
      ASSERT_EQ(actual, expected) << i;
      ASSERT_EQ(std::signbit(actual), (bits & 0x8000) != 0) << i;
    }
  }
}

TEST_P(Half, EveryPatternRoundTrips) {
  for (int i = 0; i < 0x10000; ++i) {
    const std::uint16_t bits = static_cast<std::uint16_t>(i);
    const float value = GetParam().decode(bits);
    const std::uint16_t back = GetParam().encode(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(GetParam().decode(back))) << i;
      ASSERT_EQ(back & 0x8000, bits & 0x8000) << i;
      ASSERT_NE(back & 1 << (GetParam().fraction_bits - 1), 0) << "signalling NaN from " << i;
    } else {
      ASSERT_EQ(back, bits) << i;
    }
  }
}

TEST_P(Half, RoundsRandomFloatsToNearestEven) {
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i)
    expect_rounded(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  // Random bits are seldom in f16's range: these have exponents around it, subnormals and overflow
  // included.
  for (int i = 0; i < 1'000'000; ++i) {
    const std::uint32_t exponent = 127 - 30 + random() % 50;
    const std::uint32_t sign_and_fraction = static_cast<std::uint32_t>(random()) & 0x807fffffu;
    expect_rounded(std::bit_cast<float>(sign_and_fraction | exponent << 23));
  }
}

// Points halfway between neighbours, and one float to either side, where rounding errors would
// appear.
TEST_P(Half, RoundsHalfwayPointsToEven) {
  for (int i = 0; i < 0x7fff; ++i) {
    const double low = decode_oracle(GetParam(), static_cast<std::uint16_t>(i));
    double high = decode_oracle(GetParam(), static_cast<std::uint16_t>(i + 1));
    if (std::isnan(low) || std::isnan(high) || std::isinf(low)) continue;
    if (std::isinf(high)) high = std::ldexp(1.0, GetParam().bias() + 1);
    const float middle = static_cast<float>(low + (high - low) / 2);
    for (const float sign : {1.0f, -1.0f}) {
      expect_rounded(sign * middle);
      expect_rounded(sign * std::nextafter(middle, 0.0f));
      expect_rounded(sign * std::nextafter(middle, INFINITY));
    }
  }
}

TEST_P(Half, KeepsSpecialValues) {
  const Format& format = GetParam();
  const std::uint16_t infinity =
      static_cast<std::uint16_t>(((1 << format.exponent_bits) - 1) << format.fraction_bits);
  EXPECT_EQ(format.encode(0.0f), 0);
  EXPECT_EQ(format.encode(-0.0f), 0x8000);
  EXPECT_EQ(format.encode(INFINITY), infinity);
  EXPECT_EQ(format.encode(-INFINITY), infinity | 0x8000);
  EXPECT_EQ(format.encode(std::numeric_limits<float>::max()), infinity);
  EXPECT_EQ(format.decode(format.encode(std::numeric_limits<float>::denorm_min())), 0.0f);
  // NaN whose payload has only dropped bits must not become infinity.
  for (const std::uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(format.decode(format.encode(std::bit_cast<float>(bits))))) << bits;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Half, testing::ValuesIn(kFormats),
                         [](const testing::TestParamInfo<Format>& param) {
                           return param.param.name;
                         });

TEST(Element, StoresAndLoadsEachType) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const DType dtype = static_cast<DType>(i);
    std::int64_t memory[2] = {};
    store_element(memory, dtype, 0, -3.0);
    store_element(memory, dtype, 1, 96.0);
    EXPECT_EQ(load_element(memory, dtype, 0), -3.0) << name_of(dtype);
    EXPECT_EQ(load_element(memory, dtype, 1), 96.0) << name_of(dtype);
  }
}

TEST(Element, LoadsIndicesOfBothWidths) {
  const std::int32_t narrow[] = {7, -100};
  const std::int64_t wide[] = {7, (std::int64_t{1} << 53) + 1};  // not a double
  EXPECT_EQ(load_index(narrow, DType::i32, 1), -100);
  EXPECT_EQ(load_index(wide, DType::i64, 1), (std::int64_t{1} << 53) + 1);
}

}  // namespace
}  // namespace logitless

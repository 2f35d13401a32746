// Tensor kernels against float64 over odd and tiny shapes, with equal bits on 1 and 3 threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/cpu_tensor.h"
#include "kernels/tensor/checks.h"
#include "math/gamma.h"

namespace logitless::test {
namespace {

TEST(TensorGemm, ShapesAndTransposes) {
  constexpr std::int64_t kSizes[] = {1, 2, 7, 17, 64, 129, 300};
  int number = 0;
  for (const std::int64_t m : kSizes) {
    for (const std::int64_t n : kSizes) {
      for (const std::int64_t k : kSizes) {
        if (m * n * k > 3000000) continue;
        GemmCase c;
        c.m = m;
        c.n = n;
        c.k = k;
        // Every shape with all transposes; the other options vary along.
        for (int t = 0; t < 4; ++t, ++number) {
          c.transposed_a = (t & 1) != 0;
          c.transposed_b = (t & 2) != 0;
          c.accumulate = number % 3 == 0;
          c.transposed_c = number % 5 == 0;
          check_gemm(c);
        }
      }
    }
  }
}

TEST(TensorGemm, DtypesBatchesAndStrides) {
  int number = 0;
  for (const DType dtype : kFloats) {
    for (const DType out : kFloats) {
      for (const std::int64_t k : {1, 17, 64, 700}) {
        for (int t = 0; t < 8; ++t, ++number) {
          GemmCase c;
          c.dtype = dtype;
          c.out = out;
          c.batch = 1 + number % 3;
          c.m = 31 + number % 7 * 5;
          c.n = 13 + number % 5 * 11;
          c.k = k;
          c.transposed_a = (t & 1) != 0;
          c.transposed_b = (t & 2) != 0;
          c.transposed_c = (t & 4) != 0;
          c.accumulate = number % 2 == 0;
          c.spread = number % 11 == 0 ? 2 : 1;
          check_gemm(c);
        }
      }
    }
  }
}

TEST(TensorGemm, SeveralTilesOfEachSide) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    check_gemm({.m = 421, .n = 643, .k = 37, .dtype = dtype, .out = dtype});
    check_gemm({.m = 2100, .n = 19, .k = 37, .dtype = dtype, .out = dtype});
    check_gemm({.m = 5, .n = 1700, .k = 37, .dtype = dtype, .out = dtype});
  }
}

TEST(TensorGemm, TilesOfBf16) {
  for (const std::int64_t m : {1, 33, 64, 300}) {
    for (const std::int64_t n : {1, 32, 50}) {
      for (const std::int64_t k : {1, 2, 31, 64, 1100}) {
        for (int t = 0; t < 4; ++t) {
          check_gemm({.m = m,
                      .n = n,
                      .k = k,
                      .transposed_a = (t & 1) != 0,
                      .transposed_b = (t & 2) != 0,
                      .dtype = DType::bf16,
                      .out = t % 2 == 0 ? DType::f32 : DType::bf16,
                      .accumulate = t == 0 || t == 3,
                      .spread = m == 33 && k == 31 ? 2 : 1,
                      .emulated = true});
        }
      }
    }
  }
}

TEST(TensorGemm, Doubles) {
  for (int t = 0; t < 4; ++t) {
    check_gemm({.batch = 2,
                .m = 9,
                .n = 300,
                .k = 40,
                .transposed_a = (t & 1) != 0,
                .transposed_b = (t & 2) != 0,
                .dtype = DType::f64,
                .out = DType::f64,
                .accumulate = t == 2});
  }
}

TEST(TensorGemm, NoProductsGiveZeroOrLeaveC) {
  check_gemm({.m = 0, .n = 3, .k = 2});
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const bool accumulate : {false, true})
      check_gemm({.m = 7, .n = 9, .k = 0, .dtype = dtype, .out = dtype, .accumulate = accumulate});
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// +- 2^e times a few mantissas over all exponents, small integers and the special values.
std::vector<float> magnitudes() {
  std::vector<float> values = {0.0f,   -0.0f,  1.0f,   -1.0f,   kNan,   88.7f,
                               -87.3f, 0.625f, 0.9f,   -0.9f,   0.346f, -0.3466f,
                               4.0f,   -4.5f,  1e-20f, 0.6249f, 89.0f,  -1000.0f};
  values.push_back(static_cast<float>(kInf));
  values.push_back(static_cast<float>(-kInf));
  std::mt19937 generator(5);
  std::uniform_real_distribution<float> mantissa(1.0f, 2.0f), near(-12.0f, 12.0f);
  for (int e = -125; e < 127; ++e) {
    for (int i = 0; i < 4; ++i) values.push_back(std::ldexp(mantissa(generator), e));
    for (int i = 0; i < 4; ++i) values.push_back(-std::ldexp(mantissa(generator), e));
  }
  for (int i = 0; i < 20000; ++i) values.push_back(near(generator));
  for (int i = 0; i < 4000; ++i) values.push_back(near(generator) * 8.0f);
  for (int i = 0; i < 4000; ++i) values.push_back(1.0f + near(generator) * 0.02f);
  return values;
}

using Oracle = double (*)(double, double, double);
struct OpRow {
  VectorOp op;
  double tolerance;  // relative
  Oracle oracle;
};
#define OF(expression)                                                           \
  [](double a, [[maybe_unused]] double b, [[maybe_unused]] double c) -> double { \
    return expression;                                                           \
  }
const OpRow kOps[] = {
    {VectorOp::neg, 0, OF(-a)},
    {VectorOp::abs, 0, OF(std::abs(a))},
    {VectorOp::exp, 2e-7, OF(std::exp(a))},
    {VectorOp::log, 2e-7, OF(std::log(a))},
    {VectorOp::log1p, 3e-7, OF(std::log1p(a))},
    {VectorOp::expm1, 3e-7, OF(std::expm1(a))},
    {VectorOp::sqrt, 1e-7, OF(std::sqrt(a))},
    {VectorOp::rsqrt, 2e-7, OF(1 / std::sqrt(a))},
    {VectorOp::tanh, 4e-7, OF(std::tanh(a))},
    {VectorOp::erf, 3e-7, OF(std::erf(a))},
    {VectorOp::sigmoid, 4e-7, OF(1 / (1 + std::exp(-a)))},
    {VectorOp::sin, 7e-8, OF(std::sin(a))},
    {VectorOp::cos, 7e-8, OF(std::cos(a))},
    {VectorOp::atan, 7e-8, OF(std::atan(a))},
    {VectorOp::erfc, 7e-8, OF(std::erfc(a))},
    {VectorOp::lgamma, 1e-7, OF(log_gamma(a))},
    {VectorOp::digamma, 1e-7, OF(digamma(a))},
    {VectorOp::trigamma, 1e-7, OF(trigamma(a))},
    {VectorOp::floor, 0, OF(std::floor(a))},
    {VectorOp::sign, 0, OF(std::isnan(a) ? a : double(a > 0) - double(a < 0))},
    {VectorOp::add, 1e-7, OF(a + b)},
    {VectorOp::sub, 1e-7, OF(a - b)},
    {VectorOp::mul, 1e-7, OF(a* b)},
    {VectorOp::div, 1e-7, OF(a / b)},
    {VectorOp::max, 0, OF(std::isnan(a + b) && !(a == -b) ? kNan : std::max(a, b))},
    {VectorOp::min, 0, OF(std::isnan(a + b) && !(a == -b) ? kNan : std::min(a, b))},
    {VectorOp::pow, 7e-8, OF(std::pow(a, b))},
    {VectorOp::eq, 0, OF(double(a == b))},
    {VectorOp::ne, 0, OF(double(a != b))},
    {VectorOp::lt, 0, OF(double(a < b))},
    {VectorOp::le, 0, OF(double(a <= b))},
    {VectorOp::gt, 0, OF(double(a > b))},
    {VectorOp::ge, 0, OF(double(a >= b))},
    {VectorOp::logical_and, 0, OF(double(a != 0 && b != 0))},
    {VectorOp::logical_or, 0, OF(double(a != 0 || b != 0))},
    {VectorOp::logical_not, 0, OF(double(a == 0))},
    {VectorOp::select, 0, OF(a != 0 ? b : c)},
};
#undef OF

bool close(double x, double expected, double tolerance) {
  if (std::isnan(expected)) return std::isnan(x);
  const double rounded = static_cast<float>(expected);
  if (std::isinf(rounded) || std::isinf(x)) {
    return x == rounded || (std::abs(expected) > 3.402e38 && std::abs(x) > 3.402e38);
  }
  return std::abs(x - expected) <= tolerance * std::abs(expected) + 1.2e-38;  // subnormals flush
}

TEST(TensorVector, EveryFunctionOverManyMagnitudes) {
  ASSERT_EQ(std::size(kOps), static_cast<std::size_t>(kVectorOpCount));
  const std::vector<float> a = magnitudes();
  std::vector<float> b = a, c = a;
  std::shuffle(b.begin(), b.end(), std::mt19937(1));
  std::shuffle(c.begin(), c.end(), std::mt19937(2));
  for (std::size_t i = 0; i < b.size(); i += 5) b[i] = a[i];  // equal ones
  const auto n = static_cast<std::int64_t>(a.size());
  for (const OpRow& row : kOps) {
    SCOPED_TRACE(static_cast<int>(row.op));
    std::vector<float> out(a.size());
    vector_function(row.op)(a.data(), b.data(), c.data(), out.data(), n);
    int wrong = 0;
    for (std::size_t i = 0; i < a.size() && wrong < 5; ++i) {
      const double expected = row.oracle(a[i], b[i], c[i]);
      if (!close(out[i], expected, row.tolerance)) {
        ++wrong;
        ADD_FAILURE() << "of " << a[i] << " " << b[i] << " " << c[i] << ": " << out[i]
                      << ", expected " << expected;
      }
    }
    // The same in f64, in place, and in parts shorter than a vector.
    const std::vector<double> a64(a.begin(), a.end()), b64(b.begin(), b.end()),
        c64(c.begin(), c.end());
    std::vector<double> out64(a.size());
    vector_function_f64(row.op)(a64.data(), b64.data(), c64.data(), out64.data(), n);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double expected = row.oracle(a[i], b[i], c[i]);
      ASSERT_TRUE(out64[i] == expected || (std::isnan(out64[i]) && std::isnan(expected)))
          << a[i] << " " << b[i] << " f64";
    }
    std::vector<float> part(a.begin(), a.begin() + 100);
    for (std::int64_t at = 0, size = 1; at < 100;
         at += size, size = std::min<std::int64_t>(size + 2, 100 - at))
      vector_function(row.op)(part.data() + at, b.data() + at, c.data() + at, part.data() + at,
                              size);
    EXPECT_EQ(std::memcmp(part.data(), out.data(), 100 * sizeof(float)), 0) << "in place";
  }
}

TEST(TensorVector, SumsOfExponentialsTakeOneMoreEach) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float rows[][7] = {{1, -2, -kInfinity, -kInfinity, kInfinity, 3, 80},
                           {2, -300, -kInfinity, 5, 0, NAN, -80},
                           {-1, 4, -kInfinity, -kInfinity, -kInfinity, 1, 81}};
  float top[7], sum[7] = {};
  std::fill_n(top, 7, -kInfinity);
  for (const auto& row : rows) add_exponentials(row, top, sum, 7);
  for (int i = 0; i < 7; ++i) {
    double expected = 0.0;
    for (const auto& row : rows) expected += std::exp(static_cast<double>(row[i]));
    const double found = std::log(static_cast<double>(sum[i])) + static_cast<double>(top[i]);
    if (i == 5) {
      EXPECT_TRUE(std::isnan(found));
    } else if (std::isinf(expected) || expected == 0.0) {
      EXPECT_EQ(found, std::log(expected)) << i;
    } else {
      EXPECT_NEAR(found, std::log(expected), 2e-6) << i;
    }
  }
}

TEST(TensorVector, IntegersThatFloatsRoundAreTold) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const std::int64_t numbers[] = {0, 1, -1, kMost, kMost - 1, -kMost, -kMost - 1, 1 << 24};
  std::vector<std::int64_t> a, b;
  for (const std::int64_t x : numbers) {
    for (const std::int64_t y : numbers) {
      a.push_back(x);
      b.push_back(y);
    }
  }
  const auto check = [&](VectorOp op, auto holds) {
    for (std::size_t n = 0; n <= a.size(); ++n) {
      std::vector<float> narrow(n + 1, -1.0f);
      std::vector<double> wide(n + 1, -1.0);
      compare_i64(op, a.data(), b.data(), narrow.data(), static_cast<std::int64_t>(n));
      compare_i64(op, a.data(), b.data(), wide.data(), static_cast<std::int64_t>(n));
      for (std::size_t i = 0; i < n; ++i) {
        ASSERT_EQ(wide[i], holds(a[i], b[i]) ? 1.0 : 0.0) << a[i] << " " << b[i];
        ASSERT_EQ(narrow[i], static_cast<float>(wide[i]));
      }
      ASSERT_EQ(narrow[n], -1.0f);  // nothing is written beyond
      ASSERT_EQ(wide[n], -1.0);
    }
  };
  check(VectorOp::eq, std::equal_to<>());
  check(VectorOp::ne, std::not_equal_to<>());
  check(VectorOp::lt, std::less<>());
  check(VectorOp::le, std::less_equal<>());
  check(VectorOp::gt, std::greater<>());
  check(VectorOp::ge, std::greater_equal<>());
}

TEST(TensorVector, NearZeroTheFunctionIsItsArgument) {
  for (const VectorOp op : {VectorOp::expm1, VectorOp::log1p, VectorOp::tanh}) {
    const float x = 1e-12f;
    float out = 0.0f;
    vector_function(op)(&x, nullptr, nullptr, &out, 1);
    EXPECT_EQ(out, x) << static_cast<int>(op);
  }
}

TEST(TensorVector, ConversionsRoundToNearestEven) {
  const std::vector<float> from = magnitudes();
  const auto n = static_cast<std::int64_t>(from.size());
  for (const DType dtype : kFloats) {
    Values bits(dtype, n);
    from_f32(dtype, from.data(), bits.data(), n);
    std::vector<float> back(from.size());
    to_f32(dtype, bits.data(), back.data(), n);
    std::vector<float> rounded = from;
    round_f32(dtype, rounded.data(), rounded.data(), n);
    Values expected(dtype, n);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      expected.set(i, static_cast<double>(from[at]));
      if (std::isnan(from[at])) {
        ASSERT_TRUE(std::isnan(back[at]) && std::isnan(rounded[at]));
      } else {
        ASSERT_EQ(bits[i], expected[i]) << name_of(dtype) << " of " << from[at];
        ASSERT_EQ(static_cast<double>(back[at]), expected[i]) << name_of(dtype);
        ASSERT_EQ(rounded[at], back[at]) << name_of(dtype);
      }
    }
  }
  // Ties between two 16-bit values round to the even one.
  const float ties[] = {1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, 1.0f + 0x1p-11f, 1.0f + 3 * 0x1p-11f};
  Values bf16(DType::bf16, 4), f16(DType::f16, 4);
  from_f32(DType::bf16, ties, bf16.data(), 4);
  from_f32(DType::f16, ties, f16.data(), 4);
  EXPECT_EQ(bf16[0], 1.0);
  EXPECT_EQ(bf16[1], 1.0 + 0x1p-6);
  EXPECT_EQ(f16[2], 1.0);
  EXPECT_EQ(f16[3], 1.0 + 0x1p-9);
}

TEST(TensorVector, RowReductions) {
  std::mt19937 generator(11);
  std::normal_distribution<float> normal(3.0f, 20.0f);
  for (const std::int64_t n : {0, 1, 2, 7, 8, 9, 31, 32, 33, 100, 1000, 5003}) {
    SCOPED_TRACE(n);
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = normal(generator);
    double sum = 0.0, size = 0.0, top = -kInf, power = 0.0;
    for (const float v : x) {
      sum += v;
      size += std::abs(v);
      top = std::max(top, static_cast<double>(v));
    }
    for (const float v : x) power += std::exp(v - top);
    EXPECT_NEAR(row_sum(x.data(), n), sum, 5e-7 * size);
    EXPECT_EQ(static_cast<double>(row_max(x.data(), n)), top);
    const LseState state = row_lse(x.data(), n);
    EXPECT_EQ(state.exponent, std::floor(state.exponent));
    if (n == 0) {
      EXPECT_EQ(state.sum, 0.0f);
      continue;
    }
    EXPECT_NEAR(value(state), top + std::log(power), 1e-6);
    x[static_cast<std::size_t>(n / 2)] = kNan;
    EXPECT_TRUE(std::isnan(row_sum(x.data(), n)));
    EXPECT_TRUE(std::isnan(row_max(x.data(), n)));
    EXPECT_TRUE(std::isnan(value(row_lse(x.data(), n))));
  }
  const std::vector<float> empty(9, static_cast<float>(-kInf));
  EXPECT_EQ(value(row_lse(empty.data(), 9)), -kInf);
  EXPECT_EQ(row_max(empty.data(), 9), static_cast<float>(-kInf));
}

TEST(TensorVector, ColumnReductions) {
  const std::vector<float> x = {1, -2, 3, kNan, 5, 6, 7, 8, 9, 10, -11};
  std::vector<float> sum(x.size(), 2.0f), top(x.size(), 2.0f);
  add_to(x.data(), sum.data(), 11);
  max_to(x.data(), top.data(), 11);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      EXPECT_TRUE(std::isnan(sum[i]) && std::isnan(top[i]));
    } else {
      EXPECT_EQ(sum[i], x[i] + 2.0f);
      EXPECT_EQ(top[i], std::max(x[i], 2.0f));
    }
  }
}

TEST(TensorAttention, ForwardAndBackward) {
  // B, H, Hkv, T, S
  constexpr std::int64_t kShapes[][5] = {
      {1, 1, 1, 1, 1},     {2, 2, 2, 17, 17}, {1, 4, 2, 33, 70},
      {1, 3, 1, 70, 33},   {2, 2, 1, 150, 5}, {1, 1, 1, 200, 200},
      {1, 2, 1, 395, 290}, {3, 1, 1, 1, 300}, {4, 1, 1, 20, 149}};
  for (const auto& s : kShapes) {
    for (const std::int64_t dim : {8, 40, 64}) {
      for (const DType dtype : kFloats) {
        for (const bool causal : {false, true}) {
          const float scale = 2.0f / std::sqrt(static_cast<float>(dim));
          check_attention({s[0], s[1], s[2], s[3], s[4], dim, dtype, causal, scale, 1});
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test

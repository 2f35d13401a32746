// The tensor kernels against float64, over odd and tiny shapes; the same bits on 1 and 3 threads.
#include "kernels/tensor_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <vector>

#include "core/element.h"

namespace logitless::test {
namespace {

constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16};

// Values of a tensor as its dtype holds them: in memory and as doubles.
struct Values {
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;
  Values(DType type, std::int64_t n, double fill = 0.0) : dtype(type) {
    bytes.resize(static_cast<std::size_t>(n) * size_of(type));
    for (std::int64_t i = 0; i < n; ++i) set(i, fill);
  }
  static Values random(DType type, std::int64_t n, std::uint64_t seed) {
    Values values(type, n);
    std::mt19937_64 generator(seed);
    std::uniform_real_distribution<double> uniform(-1.0, 1.0);
    for (std::int64_t i = 0; i < n; ++i) values.set(i, uniform(generator));
    return values;
  }
  double operator[](std::int64_t i) const { return load_element(bytes.data(), dtype, i); }
  void set(std::int64_t i, double x) { store_element(bytes.data(), dtype, i, x); }
  void* data() { return bytes.data(); }
  const void* data() const { return bytes.data(); }
};

// One rounding to the dtype.
double epsilon_of(DType dtype) {
  if (dtype == DType::f64) return 1e-15;
  return dtype == DType::f32 ? 6e-8 : (dtype == DType::bf16 ? 0x1p-8 : 0x1p-11);
}

// 64-byte aligned, and exactly as long as was asked for: sanitizers see what is written past it.
struct Scratch {
  static constexpr std::align_val_t kAlign{64};
  std::byte* data;
  explicit Scratch(std::size_t size)
      : data(static_cast<std::byte*>(::operator new(size, kAlign))) {}
  ~Scratch() { ::operator delete(data, kAlign); }
  Scratch(const Scratch&) = delete;
};

struct GemmCase {
  std::int64_t batch = 1, m = 1, n = 1, k = 1;
  bool transposed_a = false, transposed_b = false, transposed_c = false;
  DType dtype = DType::f32, out = DType::f32;
  bool accumulate = false;
  std::int64_t spread = 1;  // distance of the elements along the contiguous side
  bool emulated = false;
};

// Rows and columns of [rows, columns], a gap of 3 between rows.
void strides(bool transposed, std::int64_t rows, std::int64_t columns, std::int64_t spread,
             std::int64_t& batch, std::int64_t& row, std::int64_t& column) {
  const std::int64_t outer = (transposed ? rows : columns) * spread + 3;
  row = transposed ? spread : outer;
  column = transposed ? outer : spread;
  batch = (transposed ? columns : rows) * outer + 5;
}

void check_gemm(const GemmCase& c) {
  SCOPED_TRACE(testing::Message() << "batch " << c.batch << " m " << c.m << " n " << c.n << " k "
                                  << c.k << " ta " << c.transposed_a << " tb " << c.transposed_b
                                  << " tc " << c.transposed_c << " " << name_of(c.dtype) << "->"
                                  << name_of(c.out) << " accumulate " << c.accumulate << " spread "
                                  << c.spread << " emulated " << c.emulated);
  GemmProblem p;
  p.batch = c.batch;
  p.m = c.m;
  p.n = c.n;
  p.k = c.k;
  p.accumulate = c.accumulate;
  p.a.dtype = p.b.dtype = c.dtype;
  p.c.dtype = c.out;
  strides(c.transposed_a, c.m, c.k, c.spread, p.a.batch_stride, p.a.row_stride, p.a.col_stride);
  strides(c.transposed_b, c.k, c.n, c.spread, p.b.batch_stride, p.b.row_stride, p.b.col_stride);
  strides(c.transposed_c, c.m, c.n, c.spread, p.c.batch_stride, p.c.row_stride, p.c.col_stride);
  const Values a = Values::random(c.dtype, c.batch * p.a.batch_stride, 1);
  const Values b = Values::random(c.dtype, c.batch * p.b.batch_stride, 2);
  const Values before = Values::random(c.out, c.batch * p.c.batch_stride, 3);
  p.a.data = a.data();
  p.b.data = b.data();

  std::vector<Values> results;
  for (const int threads : {1, 3}) {
    Values out = before;
    p.c.data = out.data();
    p.threads = threads;
    const std::size_t size =
        c.emulated ? cpu::gemm_scratch_bytes_emulated_tiles(p) : gemm_scratch_bytes(p);
    Scratch scratch(size);
    if (c.emulated) {
      cpu::gemm_emulated_tiles(p, scratch.data);
    } else {
      gemm(p, scratch.data);
    }
    results.push_back(out);
  }
  ASSERT_EQ(results[0].bytes, results[1].bytes) << "1 and 3 threads";

  Values& out = results[0];
  std::vector<bool> written(static_cast<std::size_t>(c.batch * p.c.batch_stride), false);
  for (std::int64_t s = 0; s < c.batch; ++s) {
    for (std::int64_t i = 0; i < c.m; ++i) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        const std::int64_t at = s * p.c.batch_stride + i * p.c.row_stride + j * p.c.col_stride;
        written[static_cast<std::size_t>(at)] = true;
        double sum = c.accumulate ? before[at] : 0.0, size = std::abs(sum);
        for (std::int64_t k = 0; k < c.k; ++k) {
          const double x = a[s * p.a.batch_stride + i * p.a.row_stride + k * p.a.col_stride] *
                           b[s * p.b.batch_stride + k * p.b.row_stride + j * p.b.col_stride];
          sum += x;
          size += std::abs(x);
        }
        const double bound = epsilon_of(c.out) * std::abs(sum) +
                             (c.dtype == DType::f64 ? 1e-15 : 1e-6) * size +
                             (c.out == DType::f16 ? 0x1p-24 : 0.0);
        ASSERT_NEAR(out[at], sum, bound) << "at " << s << " " << i << " " << j;
      }
    }
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    ASSERT_TRUE(written[i] || out[at] == before[at]) << "element " << i << " lies between rows";
  }
}

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
        // Every shape with both transposes; what else differs walks along.
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

constexpr double kInf = std::numeric_limits<double>::infinity();
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
    {VectorOp::sin, 1e-7, OF(std::sin(a))},
    {VectorOp::cos, 1e-7, OF(std::cos(a))},
    {VectorOp::floor, 0, OF(std::floor(a))},
    {VectorOp::sign, 0, OF(std::isnan(a) ? a : double(a > 0) - double(a < 0))},
    {VectorOp::add, 1e-7, OF(a + b)},
    {VectorOp::sub, 1e-7, OF(a - b)},
    {VectorOp::mul, 1e-7, OF(a* b)},
    {VectorOp::div, 1e-7, OF(a / b)},
    {VectorOp::max, 0, OF(std::isnan(a + b) && !(a == -b) ? kNan : std::max(a, b))},
    {VectorOp::min, 0, OF(std::isnan(a + b) && !(a == -b) ? kNan : std::min(a, b))},
    {VectorOp::pow, 2e-7, OF(std::pow(a, b))},
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
    // The same in f64, and in place, and by parts shorter than a vector.
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
    Values expected(dtype, n);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      expected.set(i, static_cast<double>(from[at]));
      if (std::isnan(from[at])) {
        ASSERT_TRUE(std::isnan(back[at]));
      } else {
        ASSERT_EQ(bits[i], expected[i]) << name_of(dtype) << " of " << from[at];
        ASSERT_EQ(static_cast<double>(back[at]), expected[i]) << name_of(dtype);
      }
    }
  }
  // Halfway between two values of 16 bits: to the even one.
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

// Tensors [B, H, T, D] lie as [B, T, H, D], as projections leave them.
struct AttentionTensors {
  AttentionShape shape;
  Values q, k, v, d_out;
  explicit AttentionTensors(const AttentionShape& s)
      : shape(s),
        q(Values::random(s.dtype, size(true), 1)),
        k(Values::random(s.dtype, size(false), 2)),
        v(Values::random(s.dtype, size(false), 3)),
        d_out(Values::random(s.dtype, size(true), 4)) {}
  std::int64_t size(bool query) const {
    return shape.batch * (query ? shape.heads * shape.queries : shape.kv_heads * shape.keys) *
           shape.dim;
  }
  template <class T, class Data>
  T view(Data* data, bool query) const {
    const std::int64_t row = (query ? shape.heads : shape.kv_heads) * shape.dim;
    return {data, row * (query ? shape.queries : shape.keys), shape.dim, row};
  }
  std::int64_t at(bool query, std::int64_t b, std::int64_t h, std::int64_t t) const {
    const auto x = view<AttentionOperand>(static_cast<const void*>(nullptr), query);
    return b * x.stride_b + h * x.stride_h + t * x.stride_t;
  }
};

struct AttentionResult {
  Values out, dq, dk, dv;
  std::vector<float> lse;
};

AttentionResult run_attention(const AttentionTensors& x, int threads) {
  AttentionShape shape = x.shape;
  shape.threads = threads;
  const double mark = 77.0;  // every element is written
  AttentionResult r{
      Values(shape.dtype, x.size(true), mark), Values(shape.dtype, x.size(true), mark),
      Values(shape.dtype, x.size(false), mark), Values(shape.dtype, x.size(false), mark),
      std::vector<float>(static_cast<std::size_t>(shape.batch * shape.heads * shape.queries))};
  const auto in = [&](const Values& v, bool query) {
    return x.view<AttentionOperand>(v.data(), query);
  };
  const auto to = [&](Values& v, bool query) { return x.view<AttentionOutput>(v.data(), query); };
  Scratch forward(attention_scratch_bytes(shape, false));
  attention_forward(shape, in(x.q, true), in(x.k, false), in(x.v, false), to(r.out, true),
                    r.lse.data(), forward.data);
  Scratch backward(attention_scratch_bytes(shape, true));
  attention_backward(shape, in(x.q, true), in(x.k, false), in(x.v, false), in(r.out, true),
                     in(x.d_out, true), r.lse.data(), to(r.dq, true), to(r.dk, false),
                     to(r.dv, false), backward.data);
  return r;
}

void expect_close(const Values& x, const std::vector<double>& expected, double tolerance) {
  double top = 1.0;
  for (const double e : expected) top = std::max(top, std::abs(e));
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(x[static_cast<std::int64_t>(i)], expected[i], tolerance * top) << "element " << i;
}

void check_attention(const AttentionShape& shape) {
  SCOPED_TRACE(testing::Message() << name_of(shape.dtype) << " H " << shape.heads << "/"
                                  << shape.kv_heads << " T " << shape.queries << " S " << shape.keys
                                  << " D " << shape.dim << " causal " << shape.causal);
  const AttentionTensors x(shape);
  const AttentionResult r = run_attention(x, 1), three = run_attention(x, 3);
  ASSERT_EQ(r.out.bytes, three.out.bytes);
  ASSERT_EQ(std::memcmp(r.lse.data(), three.lse.data(), r.lse.size() * sizeof(float)), 0);
  ASSERT_EQ(r.dq.bytes, three.dq.bytes);
  ASSERT_EQ(r.dk.bytes, three.dk.bytes);
  ASSERT_EQ(r.dv.bytes, three.dv.bytes);

  const std::int64_t dim = shape.dim;
  std::vector<double> out(r.out.bytes.size() / size_of(shape.dtype)), dq(out.size());
  std::vector<double> dk(r.dk.bytes.size() / size_of(shape.dtype)), dv(dk.size());
  const auto cell = [](std::vector<double>& v, std::int64_t i) -> double& {
    return v[static_cast<std::size_t>(i)];
  };
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const std::int64_t kv = h / (shape.heads / shape.kv_heads);
      for (std::int64_t t = 0; t < shape.queries; ++t) {
        const std::int64_t row = x.at(true, b, h, t);
        const std::int64_t seen =
            shape.causal ? std::max<std::int64_t>(
                               0, std::min(shape.keys, t + shape.keys - shape.queries + 1))
                         : shape.keys;
        std::vector<double> p(static_cast<std::size_t>(seen));
        double sum = 0.0;
        for (std::int64_t s = 0; s < seen; ++s) {
          double score = 0.0;
          for (std::int64_t i = 0; i < dim; ++i)
            score += x.q[row + i] * x.k[x.at(false, b, kv, s) + i];
          sum += cell(p, s) = std::exp(score * static_cast<double>(shape.scale));
        }
        const float lse =
            r.lse[static_cast<std::size_t>((b * shape.heads + h) * shape.queries + t)];
        if (seen == 0) {
          ASSERT_EQ(lse, static_cast<float>(-kInf));
        } else {
          ASSERT_NEAR(lse, std::log(sum), 2e-6 * std::max(1.0, std::abs(std::log(sum))));
        }
        double delta = 0.0;
        for (std::int64_t s = 0; s < seen; ++s) {
          const std::int64_t key = x.at(false, b, kv, s);
          cell(p, s) /= sum;
          for (std::int64_t i = 0; i < dim; ++i) {
            cell(out, row + i) += cell(p, s) * x.v[key + i];
            cell(dv, key + i) += cell(p, s) * x.d_out[row + i];
            delta += cell(p, s) * x.v[key + i] * x.d_out[row + i];
          }
        }
        for (std::int64_t s = 0; s < seen; ++s) {
          const std::int64_t key = x.at(false, b, kv, s);
          double g = -delta;
          for (std::int64_t i = 0; i < dim; ++i) g += x.v[key + i] * x.d_out[row + i];
          g *= cell(p, s) * static_cast<double>(shape.scale);
          for (std::int64_t i = 0; i < dim; ++i) {
            cell(dq, row + i) += g * x.k[key + i];
            cell(dk, key + i) += g * x.q[row + i];
          }
        }
      }
    }
  }
  const double tolerance = shape.dtype == DType::f32 ? 3e-6 : 2 * epsilon_of(shape.dtype);
  expect_close(r.out, out, tolerance);
  expect_close(r.dq, dq, tolerance);
  expect_close(r.dk, dk, tolerance);
  expect_close(r.dv, dv, tolerance);
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

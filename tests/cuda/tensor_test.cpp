// GEMM and indexed rows on a GPU against double on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "kernels/device/gemm.h"
#include "kernels/device/index.h"

namespace logitless::cuda {
namespace {

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string missing = device_missing(0); !missing.empty()) GTEST_SKIP() << missing;
  }
};
using GpuGemms = OnGpu;
using GpuIndex = OnGpu;

// A tensor on host and device, rounded to its dtype.
struct Mirror {
  DType dtype;
  std::vector<std::byte> host;
  DeviceMemory device;

  Mirror(DType t, std::int64_t count)
      : dtype(t), host(static_cast<std::size_t>(count) * size_of(t)), device(host.size() + 16) {}
  void set(std::int64_t i, double value) { store_element(host.data(), dtype, i, value); }
  double get(std::int64_t i) const { return load_element(host.data(), dtype, i); }
  std::int64_t count() const { return static_cast<std::int64_t>(host.size() / size_of(dtype)); }
  void to_device() { copy_to_device(device.data(), host.data(), host.size(), nullptr); }
  void to_host() { copy_to_host(host.data(), device.data(), host.size(), nullptr); }
};

Mirror normal(DType dtype, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> numbers;
  Mirror m(dtype, count);
  for (std::int64_t i = 0; i < count; ++i) m.set(i, numbers(rng));
  m.to_device();
  return m;
}

MatrixLayout by_rows(DType dtype, std::int64_t rows, std::int64_t columns) {
  return {dtype, rows * columns, columns, 1, 16};
}
MatrixLayout by_columns(DType dtype, std::int64_t rows, std::int64_t columns) {
  return {dtype, rows * columns, 1, rows, 16};
}

// Runs c = a b and returns a description of its kernel. The call has what its epilogue reads.
std::string multiply(const GemmShape& s, const Mirror& a, const Mirror& b, Mirror& c,
                     GemmCall call = {}, bool fused = false) {
  const Product product(s);
  EXPECT_TRUE(product.fused() || !fused);
  const DeviceMemory workspace(gemm_workspace_bytes(s));
  call.a = a.device.data();
  call.b = b.device.data();
  call.c = c.device.data();
  call.workspace = workspace.data();
  product.run(call);
  synchronize(nullptr);
  c.to_host();
  return std::string(product.kernel()) + (product.fused() ? ", fused" : "");
}

void check_gemm(const GemmShape& s) {
  const auto elements = [&](const MatrixLayout& m, std::int64_t rows, std::int64_t columns) {
    return (s.batch - 1) * m.batch_stride + (rows - 1) * m.row_stride +
           (columns - 1) * m.col_stride + 1;
  };
  const Mirror a = normal(s.a.dtype, elements(s.a, s.m, s.k), 1);
  const Mirror b = normal(s.b.dtype, elements(s.b, s.k, s.n), 2);
  Mirror c = normal(s.c.dtype, elements(s.c, s.m, s.n), 3);
  const Mirror before = normal(s.c.dtype, elements(s.c, s.m, s.n), 3);
  const std::string kernel = multiply(s, a, b, c);
  const double unit = s.c.dtype == DType::bf16  ? 0x1p-8
                      : s.c.dtype == DType::f16 ? 0x1p-11
                      : s.c.dtype == DType::f32 ? 0x1p-24
                                                : 0x1p-53;
  const double sums = s.a.dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  double worst = 0.0;
  for (std::int64_t batch = 0; batch < s.batch; ++batch) {
    for (std::int64_t i = 0; i < s.m; ++i) {
      for (std::int64_t j = 0; j < s.n; ++j) {
        const auto at = [&](const MatrixLayout& m, std::int64_t row, std::int64_t column) {
          return batch * m.batch_stride + row * m.row_stride + column * m.col_stride;
        };
        double sum = s.accumulate ? before.get(at(s.c, i, j)) : 0.0, size = std::abs(sum);
        for (std::int64_t k = 0; k < s.k; ++k) {
          const double term = a.get(at(s.a, i, k)) * b.get(at(s.b, k, j));
          sum += term;
          size += std::abs(term);
        }
        const double bound = unit * std::abs(sum) + sums * static_cast<double>(s.k + 1) * size +
                             (s.c.dtype == DType::f16 ? 0x1p-25 : 0.0);
        worst = std::max(worst, std::abs(c.get(at(s.c, i, j)) - sum) / bound);
      }
    }
  }
  EXPECT_LE(worst, 1.0) << kernel;
}

TEST_F(GpuGemms, AgreeWithDouble) {
  for (const auto& [in, out] : {std::pair{DType::f32, DType::f32},
                                {DType::bf16, DType::bf16},
                                {DType::bf16, DType::f32},
                                {DType::f16, DType::f16},
                                {DType::f16, DType::f32},
                                {DType::f64, DType::f64},
                                {DType::bf16, DType::f16},
                                {DType::f32, DType::bf16}}) {
    for (const bool accumulate : {false, true}) {
      for (const auto& [m, n, k] :
           {std::array<std::int64_t, 3>{64, 96, 80}, {1, 7, 5}, {33, 1, 129}}) {
        for (int form = 0; form < 4; ++form) {
          SCOPED_TRACE(testing::Message() << name_of(in) << " to " << name_of(out) << ' ' << m
                                          << ' ' << n << ' ' << k << " form " << form);
          GemmShape s;
          s.batch = form == 0 ? 3 : 1;
          s.m = m;
          s.n = n;
          s.k = k;
          s.a = form & 1 ? by_columns(in, m, k) : by_rows(in, m, k);
          s.b = form & 2 ? by_columns(in, k, n) : by_rows(in, k, n);
          s.c = form == 3 ? by_columns(out, m, n) : by_rows(out, m, n);
          s.accumulate = accumulate;
          check_gemm(s);
        }
      }
    }
  }
}

// Sizes that are no multiples of 8, with rows that start at multiples of 16 bytes: the last few of
// each dimension are separate GEMMs, or 16-bit results are finished from fp32 sums.
TEST_F(GpuGemms, OfOddSizesAgreeWithDouble) {
  const auto up = [](std::int64_t size) { return (size + 7) / 8 * 8; };
  for (int form = 0; form < 6; ++form) {
    SCOPED_TRACE(form);
    const DType out = form >= 4 ? DType::bf16 : DType::f32;
    GemmShape s;
    s.m = 331;
    s.n = 1003;
    s.k = 1001;
    s.a = form & 1 ? by_columns(DType::bf16, up(s.m), s.k) : by_rows(DType::bf16, s.m, up(s.k));
    s.b = form & 2 ? by_columns(DType::bf16, up(s.k), s.n) : by_rows(DType::bf16, s.k, up(s.n));
    s.c = by_rows(out, s.m, up(s.n));
    s.accumulate = form == 3 || form == 5;
    check_gemm(s);
  }
}

// The same with rows side by side, at odd addresses: operands are copied, results finished from
// fp32 sums.
TEST_F(GpuGemms, OfUnalignedRowsAgreeWithDouble) {
  for (const bool across : {false, true}) {
    SCOPED_TRACE(across);
    const DType in = DType::bf16;
    GemmShape s;
    s.m = 331;
    s.n = 1003;
    s.k = 1001;
    s.a = across ? by_columns(in, s.m, s.k) : by_rows(in, s.m, s.k);
    s.b = across ? by_columns(in, s.k, s.n) : by_rows(in, s.k, s.n);
    s.c = by_rows(across ? DType::f32 : in, s.m, s.n);
    s.accumulate = across;
    EXPECT_GT(gemm_additional_bytes(s), 0);
    check_gemm(s);
  }
}

// A long inner dimension of a small fp32 result, in parts, with and without a rest and a batch.
TEST_F(GpuGemms, OfLongInnerDimensionsAgreeWithDouble) {
  for (const bool across : {false, true}) {
    SCOPED_TRACE(across);
    const DType f32 = DType::f32;
    GemmShape s;
    s.batch = across ? 2 : 1;
    s.m = 40;
    s.n = 132;
    s.k = across ? 4096 + 8 * 13 : 8192;
    s.a = across ? by_columns(f32, s.m, s.k) : by_rows(f32, s.m, s.k);
    s.b = across ? by_columns(f32, s.k, s.n) : by_rows(f32, s.k, s.n);
    s.c = by_rows(f32, s.m, s.n);
    s.accumulate = across;
    EXPECT_GT(gemm_additional_bytes(s), 0);
    check_gemm(s);
  }
}

GemmShape of_rows(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmShape s;
  s.m = m;
  s.n = n;
  s.k = k;
  s.a = by_rows(dtype, m, k);
  s.b = by_rows(dtype, k, n);
  s.c = by_rows(dtype, m, n);
  return s;
}

// An element of a product of rows, and the sum of its terms' sizes.
struct Element {
  Element(const GemmShape& s, const Mirror& a, const Mirror& b, std::int64_t i, std::int64_t j) {
    for (std::int64_t d = 0; d < s.k; ++d) {
      const double term = a.get(i * s.k + d) * b.get(d * s.n + j);
      sum += term;
      size += std::abs(term);
    }
    rounding = 0x1p-24 * static_cast<double>(s.k + 2) * (size + 8.0);
  }
  double sum = 0.0, size = 0.0, rounding = 0.0;
};

// The library may round the GEMM before it adds to it, as a separate epilogue kernel does. Rows of
// results and residuals are `apart` elements longer than their contents.
void check_epilogue(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k,
                    GemmEpilogue epilogue, std::int64_t apart, bool fused) {
  const std::int64_t step = n + apart;
  GemmShape s = of_rows(dtype, m, n, k);
  s.c = epilogue.residual_layout = by_rows(dtype, m, step);
  s.epilogue = epilogue;
  const Mirror a = normal(dtype, m * k, 1), b = normal(dtype, k * n, 2), bias = normal(dtype, n, 3),
               residual = normal(dtype, m * step, 4), before = normal(dtype, m * step, 5);
  Mirror c = normal(dtype, m * step, 5);
  GemmCall call;
  if (epilogue.bias) call.bias = bias.device.data();
  if (epilogue.residual) call.residual = residual.device.data();
  const std::string kernel = multiply(s, a, b, c, call, fused);
  const double unit = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  double worst = 0.0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < step; ++j) {
      const std::int64_t at = i * step + j;
      if (j >= n) {
        EXPECT_EQ(c.get(at), before.get(at)) << "between rows";
        continue;
      }
      const Element e(s, a, b, i, j);
      const double sum = e.sum + (epilogue.bias ? bias.get(j) : 0.0) +
                         (epilogue.residual ? residual.get(at) : 0.0);
      const double bound = e.rounding + unit * std::abs(sum) + unit * std::abs(e.sum);
      worst = std::max(worst, std::abs(c.get(at) - sum) / bound);
    }
  }
  EXPECT_LE(worst, 1.0) << kernel;
}

TEST_F(GpuGemms, TakeEpilogues) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& [bias, residual] : {std::pair{true, false}, {false, true}, {true, true}}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << ' ' << bias << residual);
      GemmEpilogue e;
      e.bias = bias;
      e.residual = residual;
      check_epilogue(dtype, 70, 96, 80, e, 0, true);
      check_epilogue(dtype, 64, 128, 64, e, 16, true);
      check_epilogue(dtype, 33, 37, 19, e, 0, false);  // unaligned rows
      e.bias_alignment = 2;
      if (bias) check_epilogue(dtype, 70, 96, 80, e, 0, false);
    }
  }
  GemmEpilogue both;
  both.bias = both.residual = true;
  check_epilogue(DType::f16, 331, 1003, 1001, both, 0, false);  // finished from fp32 sums
}

double gelu_tanh(double x) { return std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)); }
double gelu(double x) { return 0.5 * x * (1.0 + gelu_tanh(x)); }
double gelu_derivative(double x) {
  const double t = gelu_tanh(x);
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x);
}

// gelu of the sums, which go to aux, or the sums times its derivative at aux.
void check_gelu(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k,
                const GemmEpilogue& epilogue, std::int64_t apart, bool fused) {
  const std::int64_t step = n + apart;
  GemmShape s = of_rows(dtype, m, n, k);
  s.epilogue = epilogue;
  s.epilogue.aux_layout = by_rows(dtype, m, step);
  const Mirror a = normal(dtype, m * k, 1), b = normal(dtype, k * n, 2), bias = normal(dtype, n, 3),
               x = normal(dtype, m * step, 4);
  Mirror c = normal(dtype, m * n, 5), aux = normal(dtype, m * step, 4);
  GemmCall call;
  if (epilogue.bias) call.bias = bias.device.data();
  call.aux = aux.device.data();
  const std::string kernel = multiply(s, a, b, c, call, fused);
  aux.to_host();
  const double unit = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  constexpr double kOfTanh = 0x1p-9;  // error of a fast tanh in the derivative
  double worst = 0.0, worst_aux = 0.0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < step; ++j) {
      const double before = x.get(i * step + j), after = aux.get(i * step + j);
      if (j >= n) {
        EXPECT_EQ(after, before) << "between rows";
        continue;
      }
      const Element e(s, a, b, i, j);
      const double sum = e.sum + (epilogue.bias ? bias.get(j) : 0.0);
      const double of_sum = e.rounding + 2.0 * unit * (std::abs(sum) + (epilogue.bias ? 4.0 : 0.0));
      const double wanted = epilogue.gelu ? gelu(sum) : sum * gelu_derivative(before);
      const double bound =
          1.13 * of_sum + unit * std::abs(wanted) + (epilogue.gelu ? 0.0 : kOfTanh * std::abs(sum));
      worst = std::max(worst, std::abs(c.get(i * n + j) - wanted) / bound);
      if (epilogue.gelu) {
        worst_aux = std::max(worst_aux, std::abs(after - sum) / of_sum);
      } else {
        EXPECT_EQ(after, before);
      }
    }
  }
  EXPECT_LE(worst, 1.0) << kernel;
  EXPECT_LE(worst_aux, 1.0) << kernel;
}

TEST_F(GpuGemms, TakeGeluAndItsGradient) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int form : {0, 1, 2}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " form " << form);
      GemmEpilogue e;
      e.gelu = form < 2;
      e.bias = form == 1;
      e.gelu_gradient = form == 2;
      check_gelu(dtype, 70, 96, 80, e, 0, true);
      check_gelu(dtype, 1, 104, 72, e, 0, false);
      check_gelu(dtype, 64, 128, 64, e, 16, true);
      check_gelu(dtype, 33, 37, 19, e, 0, false);  // unaligned rows
    }
  }
  GemmEpilogue gelu_of_bias;
  gelu_of_bias.gelu = gelu_of_bias.bias = true;
  check_gelu(DType::bf16, 331, 1003, 1001, gelu_of_bias, 0, false);  // finished from fp32 sums
}

TEST_F(GpuGemms, TakeStridesThatMatrixUnitsDoNot) {
  GemmShape s;
  s.batch = 2;
  s.m = 70;
  s.n = 65;
  s.k = 19;
  s.a = {DType::bf16, 0, 40, 2, 2};        // batch stride 0, every other element
  s.b = {DType::bf16, 19 * 65, 65, 1, 2};  // unaligned rows
  s.c = {DType::f32, 70 * 130, 130, 2, 4};
  check_gemm(s);
  s.a = {DType::bf16, 3, 0, 1, 2};  // every row the same
  check_gemm(s);
}

TEST_F(GpuGemms, SumsOfNothingAreZero) {
  GemmShape s;
  s.m = 5;
  s.n = 6;
  s.a = by_rows(DType::f32, 5, 1);
  s.b = by_rows(DType::f32, 1, 6);
  s.c = by_rows(DType::f32, 5, 6);
  Mirror c = normal(DType::f32, 30, 1);
  GemmCall call;
  call.c = c.device.data();
  Product(s).run(call);
  synchronize(nullptr);
  c.to_host();
  for (std::int64_t i = 0; i < 30; ++i) EXPECT_EQ(c.get(i), 0.0);
}

void check_scatter(DType index_dtype, DType dtype, DType out_dtype, std::int64_t count,
                   std::int64_t rows, std::int64_t width, int spread) {
  SCOPED_TRACE(testing::Message() << name_of(dtype) << " to " << name_of(out_dtype) << ' ' << count
                                  << " of " << rows << " x " << width << " spread " << spread);
  std::mt19937_64 rng(static_cast<std::uint64_t>(count + rows));
  Mirror index(index_dtype, count);
  for (std::int64_t i = 0; i < count; ++i) {
    // Some rows are far more frequent than others, some indices are out of range.
    const auto draw = static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(rows + 2)) - 1;
    index.set(i, static_cast<double>(rng() % 4 < static_cast<unsigned>(spread) ? draw : rows / 2));
  }
  index.to_device();
  Mirror updates = normal(dtype, count * width, 5);
  if (is_index(dtype)) {
    for (std::int64_t i = 0; i < updates.count(); ++i)
      updates.set(i, static_cast<double>(rng() % 100));
    updates.to_device();
  }
  Mirror out = normal(out_dtype, rows * width, 6), again = normal(out_dtype, rows * width, 6);
  std::vector<double> expected, size;
  for (std::int64_t i = 0; i < out.count(); ++i) expected.push_back(out.get(i));
  for (const double x : expected) size.push_back(std::abs(x));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<std::int64_t>(index.get(i));
    if (row < 0 || row >= rows) continue;
    for (std::int64_t k = 0; k < width; ++k) {
      const double u = updates.get(i * width + k);
      expected[static_cast<std::size_t>(row * width + k)] += u;
      size[static_cast<std::size_t>(row * width + k)] += std::abs(u);
    }
  }
  for (Mirror* to : {&out, &again}) {
    ScatterCall c;
    c.index = index.device.data();
    c.updates = updates.device.data();
    c.out = to->device.data();
    c.index_dtype = index_dtype;
    c.dtype = dtype;
    c.out_dtype = out_dtype;
    c.rows = rows;
    c.count = count;
    c.width = width;
    const DeviceMemory workspace(scatter_workspace_bytes(c));
    c.workspace = workspace.data();
    scatter_add_rows(c);
    synchronize(nullptr);
    to->to_host();
  }
  EXPECT_EQ(out.host, again.host);
  const double unit = out_dtype == DType::f64 ? 0x1p-53 : out_dtype == DType::f32 ? 0x1p-24 : 0.0;
  // Sums of runs of 128, then their sums.
  const double depth = 130.0 + static_cast<double>(count) / 128.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_LE(std::abs(out.get(static_cast<std::int64_t>(i)) - expected[i]),
              depth * unit * size[i] + (unit == 0.0 ? 0.0 : 1e-300))
        << "element " << i;
  }
}

TEST_F(GpuIndex, ScatterAddSumsEveryUpdateInOrder) {
  for (const int spread : {0, 1, 4}) {
    check_scatter(DType::i64, DType::f32, DType::f32, 5000, 300, 33, spread);
    check_scatter(DType::i32, DType::bf16, DType::f32, 4096, 70000, 8, spread);
  }
  check_scatter(DType::i64, DType::f32, DType::f32, 1, 1, 1, 4);
  check_scatter(DType::i64, DType::f32, DType::f32, 128, 2, 130, 4);
  check_scatter(DType::i64, DType::f64, DType::f64, 3000, 17, 5, 4);
  check_scatter(DType::i64, DType::f16, DType::f32, 300, 17, 5, 4);
  check_scatter(DType::i64, DType::i64, DType::i64, 3000, 17, 5, 4);
  check_scatter(DType::i32, DType::i32, DType::i32, 3000, 17, 5, 4);
}

TEST_F(GpuIndex, TakeGivesRowsOrZero) {
  for (const std::int64_t width : {1, 3, 8, 100}) {
    for (const DType dtype : {DType::i8, DType::bf16, DType::f32, DType::f64}) {
      const std::int64_t rows = 11, count = 70;
      const Mirror table = normal(dtype, rows * width, 1);
      Mirror index(DType::i64, count), out(dtype, count * width);
      for (std::int64_t i = 0; i < count; ++i) index.set(i, static_cast<double>(i % 13 - 1));
      index.to_device();
      TakeCall c;
      c.table = table.device.data();
      c.index = index.device.data();
      c.out = out.device.data();
      c.rows = rows;
      c.count = count;
      c.row_bytes = width * static_cast<std::int64_t>(size_of(dtype));
      take_rows(c);
      synchronize(nullptr);
      out.to_host();
      for (std::int64_t i = 0; i < count * width; ++i) {
        const auto row = static_cast<std::int64_t>(index.get(i / width));
        const double expected = row >= 0 && row < rows ? table.get(row * width + i % width) : 0.0;
        ASSERT_EQ(out.get(i), expected) << name_of(dtype) << " width " << width << " at " << i;
      }
    }
  }
}

TEST_F(GpuIndex, PickFollowsStrides) {
  // x [4, 9, 5], axis 1, read transposed; out [5, 4].
  const Mirror x = normal(DType::f32, 4 * 9 * 5, 1);
  Mirror index(DType::i32, 20), out(DType::f32, 20);
  for (std::int64_t i = 0; i < 20; ++i) index.set(i, static_cast<double>(i % 11 - 1));
  index.to_device();
  PickCall c;
  c.space.rank = 2;
  c.space.sizes[0] = 5;
  c.space.sizes[1] = 4;
  c.x = x.device.data();
  c.index = index.device.data();
  c.out = out.device.data();
  c.x_strides.of[0] = 1;
  c.x_strides.of[1] = 45;
  c.index_strides.of[0] = 4;
  c.index_strides.of[1] = 1;
  c.out_strides.of[0] = 1;
  c.out_strides.of[1] = 5;
  c.size = 9;
  c.step = 5;
  c.index_dtype = DType::i32;
  c.element_bytes = 4;
  pick_elements(c);
  synchronize(nullptr);
  out.to_host();
  for (std::int64_t i = 0; i < 5; ++i) {
    for (std::int64_t j = 0; j < 4; ++j) {
      const auto k = static_cast<std::int64_t>(index.get(i * 4 + j));
      EXPECT_EQ(out.get(i + j * 5), k >= 0 && k < 9 ? x.get(j * 45 + k * 5 + i) : 0.0);
    }
  }
}

TEST_F(GpuIndex, ArgMaxIsTheFirstAndNanIsGreatest) {
  const std::int64_t rows = 5, size = 1000;
  Mirror x = normal(DType::f32, rows * size, 1);
  x.set(0 * size + 17, 9.0);
  x.set(0 * size + 900, 9.0);
  x.set(1 * size + 800, std::nan(""));
  x.set(1 * size + 999, std::nan(""));
  for (std::int64_t k = 0; k < size; ++k) {
    x.set(2 * size + k, -std::numeric_limits<double>::infinity());
    x.set(3 * size + k, 1.0);
  }
  x.set(4 * size + 999, 50.0);
  x.to_device();
  Mirror out(DType::i64, rows);
  ArgMaxCall c;
  c.space.rank = 1;
  c.space.sizes[0] = rows;
  c.x = x.device.data();
  c.out = static_cast<std::int64_t*>(out.device.data());
  c.x_strides.of[0] = size;
  c.out_strides.of[0] = 1;
  c.size = size;
  c.step = 1;
  find_largest(c);
  synchronize(nullptr);
  out.to_host();
  const double expected[] = {17, 800, 0, 0, 999};
  for (std::int64_t r = 0; r < rows; ++r) EXPECT_EQ(out.get(r), expected[r]);
}

TEST_F(GpuIndex, FillWritesItsElementsAlone) {
  Mirror out(DType::bf16, 60);
  out.to_device();
  FillCall c;
  c.space.rank = 2;
  c.space.sizes[0] = 3;
  c.space.sizes[1] = 4;
  c.out = out.device.data();
  c.out_strides.of[0] = 20;
  c.out_strides.of[1] = 2;
  c.dtype = DType::bf16;
  c.number = 1.5;
  fill_elements(c);
  synchronize(nullptr);
  out.to_host();
  for (std::int64_t i = 0; i < 60; ++i)
    EXPECT_EQ(out.get(i), i % 20 < 8 && i % 2 == 0 ? 1.5 : 0.0) << i;
}

TEST_F(GpuIndex, TargetsOfHeadsAsTheEngineTakesThem) {
  Mirror targets(DType::i32, 6), vocab_ids(DType::i64, 6), deltas(DType::f32, 6);
  const double given[] = {3, -100, 9, 10, -1, 0};
  for (std::int64_t i = 0; i < 6; ++i) targets.set(i, given[i]);
  targets.to_device();
  const Mirror d_logit = normal(DType::f32, 6, 1);
  Mirror logit = normal(DType::f32, 6, 2);
  const Mirror before = normal(DType::f32, 6, 2);
  HeadTargetsCall c;
  c.targets = targets.device.data();
  c.dtype = DType::i32;
  c.tokens = 6;
  c.vocab = 10;
  c.has_ignored = true;
  c.ignored = -100;
  c.d_logit = static_cast<const float*>(d_logit.device.data());
  c.vocab_ids = static_cast<std::int64_t*>(vocab_ids.device.data());
  c.deltas = static_cast<float*>(deltas.device.data());
  head_targets(c);
  clear_missing_logits(c, static_cast<float*>(logit.device.data()));
  synchronize(nullptr);
  vocab_ids.to_host();
  deltas.to_host();
  logit.to_host();
  const double expected[] = {3, -1, 9, 0, 0, 0};
  for (std::int64_t i = 0; i < 6; ++i) {
    const bool hits = given[i] >= 0 && given[i] < 10;
    EXPECT_EQ(vocab_ids.get(i), expected[i]);
    EXPECT_EQ(deltas.get(i), hits ? d_logit.get(i) : 0.0);
    EXPECT_EQ(logit.get(i), hits ? before.get(i) : 0.0);
  }
}

}  // namespace
}  // namespace logitless::cuda

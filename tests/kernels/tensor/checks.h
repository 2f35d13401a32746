// Checks of the tensor kernels against float64, with equal bits on 1 and 3 threads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <vector>

#include "core/element.h"
#include "kernels/cpu_tensor.h"
#include "support/dots.h"

namespace logitless::test {

inline constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16};

// Returns at least n numbers in [-1, 1] of a seed, drawn once.
inline const std::vector<double>& uniform_numbers(std::uint64_t seed, std::int64_t n) {
  struct Sequence {
    std::mt19937_64 generator;
    std::vector<double> numbers;
  };
  static std::map<std::uint64_t, Sequence> sequences;
  const auto [found, fresh] = sequences.try_emplace(seed);
  auto& [generator, numbers] = found->second;
  if (fresh) generator.seed(seed);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  while (static_cast<std::int64_t>(numbers.size()) < n) numbers.push_back(uniform(generator));
  return numbers;
}

// Values of a tensor, rounded to its dtype: in memory and as doubles.
struct Values {
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;
  Values(DType type, std::int64_t n, double fill = 0.0) : dtype(type) {
    bytes.resize(static_cast<std::size_t>(n) * size_of(type));
    for (std::int64_t i = 0; fill != 0.0 && i < n; ++i) set(i, fill);
  }
  static Values random(DType type, std::int64_t n, std::uint64_t seed) {
    Values values(type, n);
    const std::vector<double>& numbers = uniform_numbers(seed, n);
    for (std::int64_t i = 0; i < n; ++i) values.set(i, numbers[static_cast<std::size_t>(i)]);
    return values;
  }
  double operator[](std::int64_t i) const { return load_element(bytes.data(), dtype, i); }
  void set(std::int64_t i, double x) { store_element(bytes.data(), dtype, i, x); }
  void* data() { return bytes.data(); }
  const void* data() const { return bytes.data(); }
  std::vector<double> doubles() const {
    std::vector<double> x(bytes.size() / size_of(dtype));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = (*this)[static_cast<std::int64_t>(i)];
    return x;
  }
};

// Relative error of one rounding to the dtype.
inline double epsilon_of(DType dtype) {
  if (dtype == DType::f64) return 1e-15;
  return dtype == DType::f32 ? 6e-8 : (dtype == DType::bf16 ? 0x1p-8 : 0x1p-11);
}

// 64-byte aligned memory of the exact size, so that sanitizers see writes past it.
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

// Strides of [rows, columns] with a gap of 3 between rows.
inline void strides(bool transposed, std::int64_t rows, std::int64_t columns, std::int64_t spread,
                    std::int64_t& batch, std::int64_t& row, std::int64_t& column) {
  const std::int64_t outer = (transposed ? rows : columns) * spread + 3;
  row = transposed ? spread : outer;
  column = transposed ? outer : spread;
  batch = (transposed ? columns : rows) * outer + 5;
}

inline void check_gemm(const GemmCase& c) {
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
  const std::vector<double> wide_a = a.doubles(), wide_b = b.doubles();
  std::vector<bool> written(static_cast<std::size_t>(c.batch * p.c.batch_stride), false);
  for (std::int64_t s = 0; s < c.batch; ++s) {
    for (std::int64_t i = 0; i < c.m; ++i) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        const std::int64_t at = s * p.c.batch_stride + i * p.c.row_stride + j * p.c.col_stride;
        written[static_cast<std::size_t>(at)] = true;
        double sum = c.accumulate ? before[at] : 0.0, size = std::abs(sum);
        add_products(wide_a.data() + s * p.a.batch_stride + i * p.a.row_stride, p.a.col_stride,
                     wide_b.data() + s * p.b.batch_stride + j * p.b.col_stride, p.b.row_stride, c.k,
                     sum, size);
        const double bound = epsilon_of(c.out) * std::abs(sum) +
                             (c.dtype == DType::f64 ? 1e-15 : 1e-6) * size +
                             (c.out == DType::f16 ? 0x1p-24 : 0.0);
        if (std::abs(out[at] - sum) <= bound) continue;  // faster than an assertion
        ASSERT_NEAR(out[at], sum, bound) << "at " << s << " " << i << " " << j;
      }
    }
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    if (written[i]) continue;
    ASSERT_EQ(out[at], before[at]) << "element " << i << " lies between rows";
  }
}

inline constexpr double kInf = std::numeric_limits<double>::infinity();

// Tensors [B, H, T, D] are stored as [B, T, H, D], as projections write them. `shape.bias`, if
// any, gives the dtype of the bias, and strides of 0 where it broadcasts. Every tenth number of it
// is -inf.
struct AttentionTensors {
  AttentionShape shape;
  Values q, k, v, d_out;
  Values bias{DType::f32, 0}, query_segments{DType::i32, 0}, key_segments{DType::i32, 0};
  explicit AttentionTensors(const AttentionShape& s)
      : shape(s),
        q(Values::random(s.dtype, size(true), 1)),
        k(Values::random(s.dtype, size(false), 2)),
        v(Values::random(s.dtype, size(false), 3)),
        d_out(Values::random(s.dtype, size(true), 4)) {
    if (shape.bias) make_bias();
    if (shape.segments) make_segments();
  }
  void make_bias() {
    AttentionOperand& rows = shape.bias->rows;
    std::int64_t count = shape.keys;
    const auto add = [&](std::int64_t size, std::int64_t& stride) {
      stride = stride == 0 ? 0 : count;
      count *= stride == 0 ? 1 : size;
    };
    add(shape.queries, rows.stride_t);
    add(shape.heads, rows.stride_h);
    add(shape.batch, rows.stride_b);
    bias = Values::random(shape.bias->dtype, count, 5);
    for (std::int64_t i = 3; i < count; i += 10) bias.set(i, -kInf);
    rows.data = bias.data();
  }
  // Segments of 21 tokens, in order of position, with a different start in each row of the batch.
  void make_segments() {
    AttentionSegments& s = *shape.segments;
    const auto make = [&](std::int64_t length, std::int64_t& stride) {
      Values made(s.dtype, shape.batch * length);
      for (std::int64_t i = 0; i < shape.batch * length; ++i) {
        const std::int64_t place = i % length + (length == shape.keys ? 0 : shape.keys - length);
        made.set(i, static_cast<double>((place + 7 * (i / length) + 84) / 21));
      }
      stride = length;
      return made;
    };
    query_segments = make(shape.queries, s.query_stride);
    key_segments = make(shape.keys, s.key_stride);
    s.queries = query_segments.data();
    s.keys = key_segments.data();
  }
  bool sees(std::int64_t b, std::int64_t t, std::int64_t s) const {
    const std::int64_t p = t + shape.keys - shape.queries;
    return (!shape.causal || s <= p) && (shape.window == 0 || std::abs(p - s) < shape.window) &&
           (!shape.segments ||
            query_segments[b * shape.queries + t] == key_segments[b * shape.keys + s]);
  }
  // Score of a query [D] and a key [D], -inf where the query does not see the key; slope:
  // derivative of its softcap.
  double score(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t s, const double* query,
               const double* key, double& slope) const {
    slope = 1.0;
    if (!sees(b, t, s)) return -kInf;
    double z = add_dot(0.0, query, key, shape.dim) * static_cast<double>(shape.scale);
    if (shape.softcap != 0.0f) {
      const auto cap = static_cast<double>(shape.softcap);
      const double tanh = std::tanh(z / cap);
      slope = 1.0 - tanh * tanh;
      z = cap * tanh;
    }
    if (!shape.bias) return z;
    const AttentionOperand& rows = shape.bias->rows;
    return z + bias[b * rows.stride_b + h * rows.stride_h + t * rows.stride_t + s];
  }
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

inline AttentionResult run_attention(const AttentionTensors& x, int threads) {
  AttentionShape shape = x.shape;  // with pointers into x
  shape.threads = threads;
  const double mark = 77.0;  // must be overwritten everywhere
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

inline void expect_close(const Values& x, const std::vector<double>& expected, double tolerance) {
  double top = 1.0;
  for (const double e : expected) top = std::max(top, std::abs(e));
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(x[static_cast<std::int64_t>(i)], expected[i], tolerance * top) << "element " << i;
}

inline void check_attention(const AttentionShape& shape) {
  SCOPED_TRACE(testing::Message() << name_of(shape.dtype) << " H " << shape.heads << "/"
                                  << shape.kv_heads << " T " << shape.queries << " S " << shape.keys
                                  << " D " << shape.dim << " causal " << shape.causal << " softcap "
                                  << shape.softcap << " window " << shape.window << " bias "
                                  << shape.bias.has_value() << " segments "
                                  << shape.segments.has_value());
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
  const std::vector<double> wide_q = x.q.doubles(), wide_k = x.k.doubles(), wide_v = x.v.doubles(),
                            wide_d_out = x.d_out.doubles();
  const auto cell = [](std::vector<double>& v, std::int64_t i) -> double& {
    return v[static_cast<std::size_t>(i)];
  };
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const std::int64_t kv = h / (shape.heads / shape.kv_heads);
      for (std::int64_t t = 0; t < shape.queries; ++t) {
        const std::int64_t row = x.at(true, b, h, t);
        const double *query = wide_q.data() + row, *given = wide_d_out.data() + row;
        std::vector<double> p(static_cast<std::size_t>(shape.keys)), slope(p.size());
        double sum = 0.0;
        for (std::int64_t s = 0; s < shape.keys; ++s) {
          const double* key = wide_k.data() + x.at(false, b, kv, s);
          sum += cell(p, s) = std::exp(x.score(b, h, t, s, query, key, cell(slope, s)));
        }
        const float lse =
            r.lse[static_cast<std::size_t>((b * shape.heads + h) * shape.queries + t)];
        if (sum == 0.0) {
          ASSERT_EQ(lse, static_cast<float>(-kInf));
        } else {
          ASSERT_NEAR(lse, std::log(sum), 2e-6 * std::max(1.0, std::abs(std::log(sum))));
        }
        double delta = 0.0;
        for (std::int64_t s = 0; s < shape.keys; ++s) {
          const std::int64_t key = x.at(false, b, kv, s);
          cell(p, s) /= sum == 0.0 ? 1.0 : sum;
          add_scaled(out.data() + row, cell(p, s), wide_v.data() + key, dim);
          add_scaled(dv.data() + key, cell(p, s), given, dim);
          delta += cell(p, s) * add_dot(0.0, wide_v.data() + key, given, dim);
        }
        for (std::int64_t s = 0; s < shape.keys; ++s) {
          const std::int64_t key = x.at(false, b, kv, s);
          double g = add_dot(-delta, wide_v.data() + key, given, dim);
          g *= cell(p, s) * cell(slope, s) * static_cast<double>(shape.scale);
          add_scaled(dq.data() + row, g, wide_k.data() + key, dim);
          add_scaled(dk.data() + key, g, query, dim);
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

}  // namespace logitless::test

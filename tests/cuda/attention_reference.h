// Attention and its gradients in float64, with bounds of each element's rounding error.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "logitless/dtype.h"

namespace logitless::test {

struct AttentionSizes {
  std::int64_t batch = 1, heads = 1, kv_heads = 1, queries = 1, keys = 1, dim = 8;
  DType dtype = DType::bf16;
  bool causal = false;
  double scale = 1.0;
};

// A contiguous tensor [B, H, rows, D], and an error bound for each of its elements.
struct Bounded {
  std::vector<double> value, bound;
  void resize(std::int64_t n) {
    value.assign(static_cast<std::size_t>(n), 0.0);
    bound.assign(static_cast<std::size_t>(n), 0.0);
  }
};

struct AttentionExact {
  Bounded out, lse, d_q, d_k, d_v;
};

// Error of one rounding: relative, and absolute for subnormal numbers.
struct Rounding {
  double relative, tiny;
};
inline Rounding rounding_of(DType dtype) {
  if (dtype == DType::bf16) return {0x1p-8, 0x1p-133};
  if (dtype == DType::f16) return {0x1p-11, 0x1p-25};
  return {0x1p-24, 0x1p-150};
}

namespace detail {

inline double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
// value += w * row, size += w_size * |row|
inline void add(double* value, double* size, double w, double w_size, const double* row,
                std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    value[i] += w * row[i];
    size[i] += w_size * std::abs(row[i]);
  }
}

}  // namespace detail

// q, d_out [B, H, T, D]; k, v [B, Hkv, S, D], rounded to the dtype.
//
// Kernels round probabilities, score gradients and results to the dtype, and sum in fp32. The fp32
// error is `kSum` of the magnitudes summed, both for tensor-core GEMMs and for sums of thousands of
// terms. Exponentials have the error of their argument.
inline AttentionExact exact_attention(const AttentionSizes& c, const std::vector<double>& q,
                                      const std::vector<double>& k, const std::vector<double>& v,
                                      const std::vector<double>& d_out) {
  constexpr double kSum = 0x1p-20;
  const Rounding u = rounding_of(c.dtype);
  const std::int64_t dim = c.dim;
  AttentionExact exact;
  exact.out.resize(c.batch * c.heads * c.queries * dim);
  exact.d_q.resize(c.batch * c.heads * c.queries * dim);
  exact.lse.resize(c.batch * c.heads * c.queries);
  exact.d_k.resize(c.batch * c.kv_heads * c.keys * dim);
  exact.d_v.resize(c.batch * c.kv_heads * c.keys * dim);

  // Computes queries t = begin, begin + step, ... of a head; d_k and d_v are of one thread.
  const auto part = [&](std::int64_t head, std::int64_t begin, std::int64_t step, Bounded& d_k,
                        Bounded& d_v) {
    const std::int64_t kv = head / c.heads * c.kv_heads + head % c.heads / (c.heads / c.kv_heads);
    const double* keys = k.data() + kv * c.keys * dim;
    const double* values = v.data() + kv * c.keys * dim;
    std::vector<double> p(static_cast<std::size_t>(c.keys)), wrong(p.size());
    for (std::int64_t t = begin; t < c.queries; t += step) {
      const std::int64_t row = (head * c.queries + t) * dim;
      const double* const query = q.data() + row;
      const double* const d = d_out.data() + row;
      const std::int64_t seen =
          c.causal ? std::clamp<std::int64_t>(t + c.keys - c.queries + 1, 0, c.keys) : c.keys;
      const auto at = static_cast<std::size_t>(head * c.queries + t);
      if (seen == 0) {
        exact.lse.value[at] = -std::numeric_limits<double>::infinity();
        continue;
      }
      double top = -std::numeric_limits<double>::infinity();
      const double query_size = std::sqrt(detail::dot(query, query, dim));
      for (std::int64_t s = 0; s < seen; ++s) {
        const double* const key = keys + s * dim;
        const auto i = static_cast<std::size_t>(s);
        p[i] = c.scale * detail::dot(query, key, dim);
        wrong[i] =
            kSum * (1 + std::abs(c.scale) * query_size * std::sqrt(detail::dot(key, key, dim)));
        top = std::max(top, p[i]);
      }
      double sum = 0.0, worst = 0.0;
      for (std::int64_t s = 0; s < seen; ++s) {
        const auto i = static_cast<std::size_t>(s);
        sum += p[i] = std::exp(p[i] - top);
        worst = std::max(worst, wrong[i]);
      }
      const double lse = exact.lse.value[at] = top + std::log(sum);
      exact.lse.bound[at] = 2e-6 * std::max(1.0, std::abs(lse)) + (worst - kSum) / 4;
      double* const out = exact.out.value.data() + row;
      double* const out_bound = exact.out.bound.data() + row;
      for (std::int64_t s = 0; s < seen; ++s) {
        const auto i = static_cast<std::size_t>(s);
        p[i] /= sum;
        wrong[i] = p[i] * (u.relative + wrong[i] + worst + kSum) + u.tiny;
        detail::add(out, out_bound, p[i], wrong[i], values + s * dim, dim);
        const std::int64_t to = (kv * c.keys + s) * dim;
        detail::add(d_v.value.data() + to, d_v.bound.data() + to, p[i], wrong[i], d, dim);
      }
      double delta = 0.0, delta_wrong = 0.0;
      for (std::int64_t i = 0; i < dim; ++i) {
        out_bound[i] += u.relative * std::abs(out[i]) + u.tiny;
        delta += out[i] * d[i];
        delta_wrong += (out_bound[i] + kSum * std::abs(out[i])) * std::abs(d[i]);
      }
      const double d_size = std::sqrt(detail::dot(d, d, dim));
      double* const d_q = exact.d_q.value.data() + row;
      double* const d_q_bound = exact.d_q.bound.data() + row;
      for (std::int64_t s = 0; s < seen; ++s) {
        const double* const value = values + s * dim;
        const auto i = static_cast<std::size_t>(s);
        const double dp = detail::dot(d, value, dim);
        const double g = p[i] * (dp - delta);
        const double dp_wrong =
            delta_wrong + kSum * d_size * std::sqrt(detail::dot(value, value, dim));
        // The probability in it is not rounded to the dtype.
        const double exponent_wrong = wrong[i] - p[i] * u.relative - u.tiny;
        const double g_wrong = (u.relative + kSum) * std::abs(g) +
                               exponent_wrong * std::abs(dp - delta) + p[i] * dp_wrong + u.tiny;
        detail::add(d_q, d_q_bound, c.scale * g, std::abs(c.scale) * g_wrong, keys + s * dim, dim);
        const std::int64_t to = (kv * c.keys + s) * dim;
        detail::add(d_k.value.data() + to, d_k.bound.data() + to, c.scale * g,
                    std::abs(c.scale) * g_wrong, query, dim);
      }
      for (std::int64_t i = 0; i < dim; ++i) d_q_bound[i] += u.relative * std::abs(d_q[i]) + u.tiny;
    }
  };

  const auto threads = static_cast<std::int64_t>(
      c.queries * c.keys < 20000 ? 1 : std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
  std::vector<Bounded> d_k(static_cast<std::size_t>(threads)), d_v(d_k.size());
  std::vector<std::thread> workers;
  for (std::int64_t i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      Bounded& my_d_k = d_k[static_cast<std::size_t>(i)];
      Bounded& my_d_v = d_v[static_cast<std::size_t>(i)];
      my_d_k.resize(static_cast<std::int64_t>(exact.d_k.value.size()));
      my_d_v.resize(static_cast<std::int64_t>(exact.d_v.value.size()));
      for (std::int64_t head = 0; head < c.batch * c.heads; ++head)
        part(head, i, threads, my_d_k, my_d_v);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const auto gather = [&](const std::vector<Bounded>& parts, Bounded& to) {
    for (std::size_t i = 0; i < to.value.size(); ++i) {
      for (const Bounded& b : parts) {
        to.value[i] += b.value[i];
        to.bound[i] += b.bound[i];
      }
      to.bound[i] += u.relative * std::abs(to.value[i]) + u.tiny;
    }
  };
  gather(d_k, exact.d_k);
  gather(d_v, exact.d_v);
  return exact;
}

}  // namespace logitless::test

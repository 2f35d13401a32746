// The result of a reduced row, accumulated block by block.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "compiler/ir/graph.h"
#include "compiler/plan/integers.h"
#include "kernels/cpu_tensor.h"
#include "math/lse_state.h"

namespace logitless::ir {

// Updates an online log-sum-exp, which is log(sum) + top: `top` is the maximum, `sum` adds exp(x -
// top). Starts with top = -inf and sum = 0. The difference of equal infinities counts as 0. A NaN
// enters the sum and stays there.
template <typename R>
inline void add_exponential(R x, R& top, R& sum) {
  const R next = std::max(top, x);  // a NaN is not taken
  const R a = top == next ? R(1) : std::exp(top - next);
  const R b = x == next ? R(1) : std::exp(x - next);
  sum = sum * a + b;
  top = next;
}

// Returns the start of a maximum: -inf, or the least integer of the dtype.
template <typename R>
R least(DType dtype) {
  return std::is_integral_v<R> ? static_cast<R>(-most_of(dtype))
                               : -std::numeric_limits<R>::infinity();
}

// Returns a + b, which wraps.
inline std::int64_t wrapped_sum(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

// Returns the product of n numbers: eight at a time, so that multiplications do not wait.
template <typename R>
double row_product(const R* x, std::int64_t n) {
  constexpr std::int64_t kLanes = 8;
  std::array<double, kLanes> lanes;
  lanes.fill(1.0);
  for (std::int64_t i = 0; i + kLanes <= n; i += kLanes) {
    for (std::int64_t k = 0; k < kLanes; ++k)
      lanes[static_cast<std::size_t>(k)] *= static_cast<double>(x[i + k]);
  }
  for (std::int64_t i = n / kLanes * kLanes; i < n; ++i) lanes[0] *= static_cast<double>(x[i]);
  double product = lanes[0];
  for (std::size_t k = 1; k < lanes.size(); ++k) product *= lanes[k];
  return product;
}

// Returns the reduction of no elements; that of a log-sum-exp is not read. dtype: of the result.
template <typename R>
R first_of(Reduce kind, DType dtype) {
  if (kind == Reduce::product) return R(1);
  return kind == Reduce::max ? least<R>(dtype) : R(0);
}

// R: type of the numbers: float, double, or std::int64_t for sums and maxima.
template <typename R>
class Sum {
 public:
  using Result = std::conditional_t<std::is_integral_v<R>, std::int64_t, double>;

  // `dtype`: of the result.
  Sum(Reduce kind, DType dtype)
      : kind_(kind), value_(first_of<Result>(kind == Reduce::lse ? Reduce::max : kind, dtype)) {}
  void add(const R* x, std::int64_t n) {
    if (kind_ == Reduce::product) {
      merge_value(static_cast<Result>(row_product(x, n)));
      return;
    }
    if constexpr (std::is_same_v<R, float>) {
      switch (kind_) {
        case Reduce::sum:
          value_ += static_cast<double>(row_sum(x, n));
          break;
        case Reduce::max:
          maximum(static_cast<double>(row_max(x, n)));
          break;
        default:
          lse_ = merge(lse_, row_lse(x, n));
      }
    } else if constexpr (std::is_integral_v<R>) {
      for (std::int64_t i = 0; i < n; ++i) merge_value(x[i]);
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        if (kind_ == Reduce::sum) {
          value_ += x[i];
        } else if (kind_ == Reduce::max) {
          maximum(x[i]);
        } else {
          add_exponential(x[i], value_, sum_);
        }
      }
    }
  }
  void merge_value(Result v) {
    if constexpr (std::is_integral_v<R>) {
      value_ = kind_ == Reduce::sum ? wrapped_sum(value_, v) : std::max(value_, v);
    } else if (kind_ == Reduce::sum) {
      value_ += v;
    } else if (kind_ == Reduce::product) {
      value_ *= v;
    } else {
      maximum(v);
    }
  }
  Result value() const {
    if (kind_ != Reduce::lse || std::is_integral_v<R>) return value_;
    if constexpr (std::is_same_v<R, float>) return static_cast<double>(logitless::value(lse_));
    return value_ + static_cast<Result>(std::log(sum_));
  }

 private:
  Reduce kind_;
  Result value_;
  double sum_ = 0.0;
  LseState lse_;
  void maximum(Result x) {
    value_ = std::isnan(x) || std::isnan(value_) ? x + value_ : std::max(value_, x);
  }
};

}  // namespace logitless::ir

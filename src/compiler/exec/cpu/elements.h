// Loads and stores rows of numbers of any dtype to and from the registers of a loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "core/half.h"
#include "logitless/dtype.h"

namespace logitless::ir {

// Calls f with an element of the dtype's type and its conversions to and from a number. 16-bit
// floats are passed as their bits.
template <typename F>
void with_element(DType dtype, F&& f) {
  const auto number = [&]<typename T>(T) {
    f(
        T{}, [](T x) { return x; }, [](auto x) { return static_cast<T>(x); });
  };
  switch (dtype) {
    case DType::f32:
      return number(float{});
    case DType::f64:
      return number(double{});
    case DType::i8:
      return number(std::int8_t{});
    case DType::i32:
      return number(std::int32_t{});
    case DType::i64:
      return number(std::int64_t{});
    case DType::bf16:
      return f(std::uint16_t{}, bf16_to_float,
               [](auto x) { return float_to_bf16(static_cast<float>(x)); });
    case DType::f16:
      return f(std::uint16_t{}, f16_to_float,
               [](auto x) { return float_to_f16(static_cast<float>(x)); });
  }
  throw InternalError("elements of no dtype");
}

// Loads n elements that are `stride` elements apart.
template <typename R>
void load_numbers(DType dtype, const std::byte* at, std::int64_t stride, R* to, std::int64_t n) {
  with_element(dtype, [&]<typename T>(T, auto number, auto) {
    const auto* from = reinterpret_cast<const T*>(at);
    if (stride == 1) {  // a separate loop, which compilers vectorise
      for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<R>(number(from[i]));
    } else {
      for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<R>(number(from[i * stride]));
    }
  });
}

// Loads rows of n elements. Neighbours down a column are neighbours in memory; those in a row are
// `stride` elements apart.
template <typename R>
void load_transposed(DType dtype, const std::byte* at, std::int64_t stride, R* to,
                     std::int64_t rows, std::int64_t n) {
  with_element(dtype, [&]<typename T>(T, auto number, auto) {
    const auto* from = reinterpret_cast<const T*>(at);
    for (std::int64_t k = 0; k < n; ++k, from += stride) {
      for (std::int64_t r = 0; r < rows; ++r) to[r * n + k] = static_cast<R>(number(from[r]));
    }
  });
}

// Returns to + x. Integers wrap; floats are added in double.
template <typename T, typename R>
T added(T to, R x) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(to) +
                          static_cast<std::uint64_t>(static_cast<std::int64_t>(x)));
  } else {
    return static_cast<T>(static_cast<double>(to) + static_cast<double>(x));
  }
}

// Stores n numbers; with `accumulate` they are added to the stored ones.
template <typename R>
void store_numbers(DType dtype, std::byte* at, std::int64_t stride, const R* from, std::int64_t n,
                   bool accumulate) {
  with_element(dtype, [&]<typename T>(T, auto number, auto element) {
    auto* to = reinterpret_cast<T*>(at);
    if (accumulate) {
      for (std::int64_t i = 0; i < n; ++i) {
        if constexpr (std::is_same_v<T, std::uint16_t>) {  // a 16-bit float
          to[i * stride] = element(added<double>(number(to[i * stride]), from[i]));
        } else {
          to[i * stride] = added(to[i * stride], from[i]);
        }
      }
    } else if (stride == 1) {
      for (std::int64_t i = 0; i < n; ++i) to[i] = element(from[i]);
    } else {
      for (std::int64_t i = 0; i < n; ++i) to[i * stride] = element(from[i]);
    }
  });
}

}  // namespace logitless::ir

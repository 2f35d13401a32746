// Access to one element of a strided view as double or integer, for small arrays and the reference
// kernel. It is too slow for hot loops.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "logitless/dtype.h"

namespace logitless {

inline double load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::bf16:
      return bf16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DType::f16:
      return f16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DType::i32:
      return static_cast<const std::int32_t*>(data)[index];
    case DType::i64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
    case DType::i8:
      return static_cast<const std::int8_t*>(data)[index];
  }
  return 0.0;
}

// Rounds once from double to f32, and from there to 16 bit.
inline void store_element(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::f64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[index] = float_to_bf16(static_cast<float>(value));
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[index] = float_to_f16(static_cast<float>(value));
      break;
    case DType::i32:
      static_cast<std::int32_t*>(data)[index] = static_cast<std::int32_t>(value);
      break;
    case DType::i64:
      static_cast<std::int64_t*>(data)[index] = static_cast<std::int64_t>(value);
      break;
    case DType::i8:
      static_cast<std::int8_t*>(data)[index] = static_cast<std::int8_t>(value);
      break;
  }
}

inline std::int64_t load_index(const void* data, DType dtype, std::int64_t index) {
  return dtype == DType::i64 ? static_cast<const std::int64_t*>(data)[index]
                             : static_cast<const std::int32_t*>(data)[index];
}

}  // namespace logitless

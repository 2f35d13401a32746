// Loads and stores of elements of any dtype by index.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/numbers.cuh"

namespace logitless::cuda {

template <typename R>
__device__ __forceinline__ R load(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<R>(static_cast<const float*>(data)[i]);
    case DType::f64:
      return static_cast<R>(static_cast<const double*>(data)[i]);
    case DType::bf16:
      return static_cast<R>(as_float(static_cast<const __nv_bfloat16*>(data)[i]));
    case DType::f16:
      return static_cast<R>(as_float(static_cast<const __half*>(data)[i]));
    case DType::i32:
      return static_cast<R>(static_cast<const std::int32_t*>(data)[i]);
    case DType::i64:
      return static_cast<R>(static_cast<const std::int64_t*>(data)[i]);
    case DType::i8:
      return static_cast<R>(static_cast<const std::int8_t*>(data)[i]);
  }
  return R{0};
}

template <typename R>
__device__ __forceinline__ void store(void* data, DType dtype, std::int64_t i, R value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    case DType::f64:
      static_cast<double*>(data)[i] = static_cast<double>(value);
      break;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(data)[i] = rounded<__nv_bfloat16>(static_cast<float>(value));
      break;
    case DType::f16:
      static_cast<__half*>(data)[i] = rounded<__half>(static_cast<float>(value));
      break;
    case DType::i32:
      static_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(value);
      break;
    case DType::i64:
      static_cast<std::int64_t*>(data)[i] = static_cast<std::int64_t>(value);
      break;
    case DType::i8:
      static_cast<std::int8_t*>(data)[i] = static_cast<std::int8_t>(value);
      break;
  }
}

__device__ __forceinline__ std::int64_t index_at(const void* data, DType dtype, std::int64_t i) {
  return dtype == DType::i32 ? std::int64_t{static_cast<const std::int32_t*>(data)[i]}
                             : static_cast<const std::int64_t*>(data)[i];
}

}  // namespace logitless::cuda

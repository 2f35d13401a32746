// Conversions between float and the floating-point types of a head on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "logitless/dtype.h"

namespace logitless::cuda {

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float as_float(__half v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T rounded(float v);
template <>
__device__ __forceinline__ float rounded<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float v) {
  return __float2bfloat16(v);
}
template <>
__device__ __forceinline__ __half rounded<__half>(float v) {
  return __float2half(v);
}

// The two numbers of 32 bits, the lower half first.
template <typename T>
__device__ __forceinline__ float2 pair_of(unsigned bits) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 pair;
    std::memcpy(&pair, &bits, sizeof pair);
    return __half22float2(pair);
  } else {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
}

// Calls f(T{}) with the type of a dtype.
template <typename F>
void with_type(DType dtype, F f) {
  if (dtype == DType::bf16) {
    f(__nv_bfloat16{});
  } else if (dtype == DType::f16) {
    f(__half{});
  } else {
    f(float{});
  }
}

}  // namespace logitless::cuda

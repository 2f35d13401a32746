// wgmma of a warpgroup on 64 rows: d [64][2 n] (+)= a [64][16] . b [16][2 n], fp32 accumulators and
// bf16 operands. a is in shared memory, or in registers in the layout of rounded accumulators of an
// earlier wgmma. kTransposeA/B: the operand has M or N contiguous. See sm90.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/sm90.cuh"

namespace logitless::cuda {

// Keeps the compiler from moving uses of the accumulators before the wait for them.
template <int N>
__device__ __forceinline__ void wgmma_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// add: d += a . b, else d = a . b.
template <int kTransposeA, int kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, %35, %36;\n}"
      : LOGITLESS_ACCUMULATORS_32(0)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA), "n"(kTransposeB));
}

#define LOGITLESS_WGMMA_N128(types)                                                      \
  asm volatile(                                                                          \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." types                               \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, %64, %65, p, 1, 1, %67, %68;\n}"                                               \
      : LOGITLESS_ACCUMULATORS_32(0), LOGITLESS_ACCUMULATORS_32(32)                      \
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA), "n"(kTransposeB))

// T: bf16 or f16.
template <int kTransposeA, int kTransposeB, typename T = __nv_bfloat16>
__device__ __forceinline__ void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, int add) {
  if constexpr (std::is_same_v<T, __half>) {
    LOGITLESS_WGMMA_N128("f16.f16");
  } else {
    LOGITLESS_WGMMA_N128("bf16.bf16");
  }
}
#undef LOGITLESS_WGMMA_N128

template <int kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b,
                                      int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : LOGITLESS_ACCUMULATORS_32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposeB));
}

template <int kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b,
                                      int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : LOGITLESS_ACCUMULATORS_32(0), LOGITLESS_ACCUMULATORS_32(32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposeB));
}

}  // namespace logitless::cuda

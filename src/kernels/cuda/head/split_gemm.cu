// Products of fp32 matrices by three products of bf16 (Henry, Tang, Heinecke 2019): x = high + low
// + rest, where high and low are bf16 and the rest is at most 2^-18 |x|, and
//   x y = low_x high_y + high_x low_y + high_x high_y
// up to 2^-16 |x y|. The three are one GEMM over three times the contracted length: a stretch of
// the operands is written as (low, high, high) and (high, low, high). A right operand of bf16 has
// no lower part, and two products are enough: (low, high) and (high, high).

#include <algorithm>

#include "core/check.h"
#include "kernels/cuda/cublas.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/sizes.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 4;  // adjacent elements of a thread

// A stretch of an operand, [rows, columns], and where its parts go.
struct Operand {
  const void* from;
  DType dtype;
  std::int64_t from_stride;
  __nv_bfloat16* to;
  std::int64_t to_stride;
  std::int64_t part;  // elements between the parts
  std::int64_t rows, columns;
  // With zeros behind, multiples of 8: of what the GEMM contracts, or rows aligned to 16 bytes.
  std::int64_t padded_rows, padded_columns;
  int parts;       // 2 where the right operand is bf16, else 3
  bool low_first;  // (low, high, high), else (high, low, high); or (low, high), else (high, high)
  bool aligned;    // rows of `from` begin at multiples of kWide elements
};

template <typename T>
struct alignas(sizeof(T) * kWide) Pack {
  T values[kWide];
};

__device__ __forceinline__ void split(float x, __nv_bfloat16& high, __nv_bfloat16& low) {
  high = __float2bfloat16(x);
  if (isinf(__bfloat162float(high)) && isfinite(x)) high = __float2bfloat16_rz(x);
  const float rest = x - __bfloat162float(high);
  low = __float2bfloat16(isfinite(x) ? rest : 0.0f);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) split_operand(const Operand o) {
  const std::int64_t column =
      (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWide;  // padded_columns: by 8
  if (column >= o.padded_columns) return;
  for (std::int64_t row = blockIdx.y; row < o.padded_rows; row += gridDim.y) {
    float x[kWide];
    const T* const from = static_cast<const T*>(o.from) + row * o.from_stride + column;
    if (row < o.rows && column + kWide <= o.columns && o.aligned) {
      const auto four = *reinterpret_cast<const Pack<T>*>(from);
#pragma unroll
      for (int i = 0; i < kWide; ++i) x[i] = as_float(four.values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWide; ++i)
        x[i] = row < o.rows && column + i < o.columns ? as_float(from[i]) : 0.0f;
    }
    Pack<__nv_bfloat16> high, low;
#pragma unroll
    for (int i = 0; i < kWide; ++i) split(x[i], high.values[i], low.values[i]);
    __nv_bfloat16* const to = o.to + row * o.to_stride + column;
    using Stored = Pack<__nv_bfloat16>;
    *reinterpret_cast<Stored*>(to) = o.low_first ? low : high;
    *reinterpret_cast<Stored*>(to + o.part) = o.low_first || o.parts == 2 ? high : low;
    if (o.parts == 3) *reinterpret_cast<Stored*>(to + 2 * o.part) = high;
  }
}

void enqueue_split(const Operand& o, Stream stream) {
  constexpr std::int64_t kMostRows = 65535;
  const dim3 blocks(static_cast<unsigned>(ceil_div(o.padded_columns, kThreads * kWide)),
                    static_cast<unsigned>(std::min(o.padded_rows, kMostRows)));
  with_type(o.dtype, [&](auto type) {
    split_operand<decltype(type)><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(o);
  });
  require_cuda(cudaGetLastError(), "splitting an operand");
}

// Elements from k on, of an operand [k, other] (`along_rows`) or [other, k]; `to` gets
// [parts padded_k, padded_other] or [other, parts padded_k].
Operand stretch(const void* data, DType dtype, std::int64_t stride, bool along_rows, int parts,
                std::int64_t first, std::int64_t k, std::int64_t other, __nv_bfloat16* to) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t length = ceil_div(k, 8) * 8;
  Operand o{};
  o.from = static_cast<const std::byte*>(data) + first * (along_rows ? stride : 1) * element;
  o.dtype = dtype;
  o.parts = parts;
  o.from_stride = stride;
  o.aligned = reinterpret_cast<std::uintptr_t>(o.from) % (kWide * size_of(dtype)) == 0 &&
              stride % kWide == 0;
  o.to = to;
  if (along_rows) {
    const std::int64_t width = ceil_div(other, 8) * 8;
    o.rows = k;
    o.padded_rows = length;
    o.columns = other;
    o.padded_columns = o.to_stride = width;
    o.part = length * width;
  } else {
    o.rows = o.padded_rows = other;
    o.columns = k;
    o.padded_columns = o.part = length;
    o.to_stride = parts * length;
  }
  return o;
}

}  // namespace

void multiply_split(const Gemm& g, const Splits& splits_a, const Splits& splits_b, void* workspace,
                    Stream stream, std::size_t bytes) {
  if (g.m == 0 || g.n == 0) return;
  if (g.alpha != nullptr) throw InternalError("a split product takes no factors");
  const int parts = splits_b.dtype == DType::bf16 ? 2 : 3;
  for (std::int64_t first = 0; first < g.k; first += kSplitStretch) {
    const std::int64_t k = std::min(kSplitStretch, g.k - first);
    const auto at = [&](const Splits& splits, std::int64_t other) {
      const std::size_t before = split_bytes(other, std::min(first, splits.kept * kSplitStretch));
      return reinterpret_cast<__nv_bfloat16*>(static_cast<std::byte*>(splits.data) + before);
    };
    const auto is_there = [&](const Splits& splits) {
      return splits.ready && first < splits.kept * kSplitStretch;
    };
    Operand of_a = stretch(g.a, splits_a.dtype, g.a_stride, g.a_transposed, parts, first, k, g.m,
                           at(splits_a, g.m));
    of_a.low_first = true;
    const Operand of_b = stretch(g.b, splits_b.dtype, g.b_stride, !g.b_transposed, parts, first, k,
                                 g.n, at(splits_b, g.n));
    if (!is_there(splits_a)) enqueue_split(of_a, stream);
    if (!is_there(splits_b)) enqueue_split(of_b, stream);
    Gemm part = g;
    part.dtype = DType::bf16;
    part.precision = Precision::ieee;
    part.a = of_a.to;
    part.a_stride = of_a.to_stride;
    part.b = of_b.to;
    part.b_stride = of_b.to_stride;
    part.k = parts * ceil_div(k, 8) * 8;
    part.adds = g.adds || first > 0;
    cublas_multiply(part, workspace, stream, bytes);
  }
}

}  // namespace logitless::cuda

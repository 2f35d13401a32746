// Products of fp32 matrices by three products of bf16 (Henry, Tang, Heinecke 2019): x = high + low
// + rest, where high and low are bf16 and the rest is at most 2^-18 |x|, and
//   x y = low_x high_y + high_x low_y + high_x high_y
// up to 2^-16 |x y|. The three are one GEMM over three times the contracted length: a stretch of
// the operands is written as (low, high, high) and (high, low, high).
#include <cuda_bf16.h>

#include <algorithm>

#include "core/check.h"
#include "kernels/cuda/cublas.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/sizes.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 4;  // adjacent elements of a thread

// A stretch of an operand, [rows, columns], and where its parts go.
struct Operand {
  const float* from;
  std::int64_t from_stride;
  __nv_bfloat16* to;
  std::int64_t to_stride;
  std::int64_t part;  // elements between the three parts
  std::int64_t rows, columns;
  // With zeros behind, multiples of 8: of what the GEMM contracts, or rows aligned to 16 bytes.
  std::int64_t padded_rows, padded_columns;
  bool low_first;  // (low, high, high), else (high, low, high)
  bool aligned;    // rows of `from` begin at multiples of 16 bytes
};

struct alignas(sizeof(__nv_bfloat16) * kWide) Pack {
  __nv_bfloat16 values[kWide];
};

__device__ __forceinline__ void split(float x, __nv_bfloat16& high, __nv_bfloat16& low) {
  high = __float2bfloat16(x);
  if (isinf(__bfloat162float(high)) && isfinite(x)) high = __float2bfloat16_rz(x);
  const float rest = x - __bfloat162float(high);
  low = __float2bfloat16(isfinite(x) ? rest : 0.0f);
}

__global__ void __launch_bounds__(kThreads) split_operand(const Operand o) {
  const std::int64_t column =
      (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWide;  // padded_columns: by 8
  if (column >= o.padded_columns) return;
  for (std::int64_t row = blockIdx.y; row < o.padded_rows; row += gridDim.y) {
    float x[kWide];
    const float* const from = o.from + row * o.from_stride + column;
    if (row < o.rows && column + kWide <= o.columns && o.aligned) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < kWide; ++i)
        x[i] = row < o.rows && column + i < o.columns ? from[i] : 0.0f;
    }
    Pack high, low;
#pragma unroll
    for (int i = 0; i < kWide; ++i) split(x[i], high.values[i], low.values[i]);
    __nv_bfloat16* const to = o.to + row * o.to_stride + column;
    *reinterpret_cast<Pack*>(to) = o.low_first ? low : high;
    *reinterpret_cast<Pack*>(to + o.part) = o.low_first ? high : low;
    *reinterpret_cast<Pack*>(to + 2 * o.part) = high;
  }
}

void enqueue_split(const Operand& o, Stream stream) {
  constexpr std::int64_t kMostRows = 65535;
  const dim3 blocks(static_cast<unsigned>(ceil_div(o.padded_columns, kThreads * kWide)),
                    static_cast<unsigned>(std::min(o.padded_rows, kMostRows)));
  split_operand<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(o);
  require_cuda(cudaGetLastError(), "splitting an operand");
}

// Elements from k on, of an operand [k, other] (`along_rows`) or [other, k]; `to` gets
// [3 padded_k, padded_other] or [other, 3 padded_k].
Operand stretch(const void* data, std::int64_t stride, bool along_rows, std::int64_t first,
                std::int64_t k, std::int64_t other, __nv_bfloat16* to) {
  const auto* const from = static_cast<const float*>(data);
  const std::int64_t length = ceil_div(k, 8) * 8;
  Operand o{};
  o.from = from + first * (along_rows ? stride : 1);
  o.from_stride = stride;
  o.aligned = reinterpret_cast<std::uintptr_t>(o.from) % 16 == 0 && stride % kWide == 0;
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
    o.to_stride = 3 * length;
  }
  return o;
}

}  // namespace

void multiply_split(const Gemm& g, const Splits& splits_a, const Splits& splits_b, void* workspace,
                    Stream stream, std::size_t bytes) {
  if (g.m == 0 || g.n == 0) return;
  if (g.alpha != nullptr) throw InternalError("a split product takes no factors");
  for (std::int64_t first = 0; first < g.k; first += kSplitStretch) {
    const std::int64_t k = std::min(kSplitStretch, g.k - first);
    const auto at = [&](const Splits& splits, std::int64_t other) {
      const std::size_t before = split_bytes(other, std::min(first, splits.kept * kSplitStretch));
      return reinterpret_cast<__nv_bfloat16*>(static_cast<std::byte*>(splits.data) + before);
    };
    const auto is_there = [&](const Splits& splits) {
      return splits.ready && first < splits.kept * kSplitStretch;
    };
    Operand of_a = stretch(g.a, g.a_stride, g.a_transposed, first, k, g.m, at(splits_a, g.m));
    of_a.low_first = true;
    const Operand of_b =
        stretch(g.b, g.b_stride, !g.b_transposed, first, k, g.n, at(splits_b, g.n));
    if (!is_there(splits_a)) enqueue_split(of_a, stream);
    if (!is_there(splits_b)) enqueue_split(of_b, stream);
    Gemm part = g;
    part.dtype = DType::bf16;
    part.precision = Precision::ieee;
    part.a = of_a.to;
    part.a_stride = of_a.to_stride;
    part.b = of_b.to;
    part.b_stride = of_b.to_stride;
    part.k = 3 * ceil_div(k, 8) * 8;
    part.adds = g.adds || first > 0;
    cublas_multiply(part, workspace, stream, bytes);
  }
}

}  // namespace logitless::cuda

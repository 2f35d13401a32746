// Tensor maps: descriptors of a matrix for TMA.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "kernels/cuda/device/driver_function.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/device/head.h"
#include "logitless/dtype.h"

namespace logitless::cuda {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  static const auto function = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  return function;
}

// Tensor map with boxes of box_rows rows x 128 bytes and 128-byte swizzle; reads 0 outside the
// matrix. f32 or bf16; the row stride counts elements and is a multiple of 16 bytes.
inline CUtensorMap matrix_map(const void* data, DType dtype, std::int64_t rows,
                              std::int64_t columns, std::int64_t row_stride, int box_rows) {
  CUtensorMap map;
  const bool narrow = dtype == DType::bf16;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * (narrow ? 2 : 4)};
  const cuuint32_t box[] = {narrow ? 64u : 32u, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = encode_tiled()(
      &map, narrow ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError(concat("cuTensorMapEncodeTiled: error ", static_cast<int>(result)));
  return map;
}

// Tensor map of bf16 [batch, heads, rows, dim]. Strides count elements and are multiples of 8; the
// last dimension is contiguous. Boxes are box_rows rows x 64 columns of one head with 128-byte
// swizzle; reads 0 outside.
inline CUtensorMap head_map(const void* data, std::int64_t batch, std::int64_t heads,
                            std::int64_t rows, std::int64_t dim, std::int64_t stride_b,
                            std::int64_t stride_h, std::int64_t stride_t, int box_rows) {
  CUtensorMap map;
  // a dimension of size 1 has no stride
  const auto bytes = [](std::int64_t size, std::int64_t stride) {
    return static_cast<cuuint64_t>(size <= 1 ? 16 : stride * 2);
  };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[] = {bytes(rows, stride_t), bytes(heads, stride_h),
                                bytes(batch, stride_b)};
  const cuuint32_t box[] = {64u, static_cast<cuuint32_t>(box_rows), 1u, 1u};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes,
                     strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError(concat("cuTensorMapEncodeTiled: error ", static_cast<int>(result)));
  return map;
}

// Tensor maps of a block of logits: one for each vocabulary range, or a single one.
struct BlockMaps {
  CUtensorMap of[kMaxVocabRanges];
  int first[kMaxVocabRanges + 1];  // vocabulary entries; none is beyond the last range
  // Calls f(map, column) for an entry. In the common case of one map its address is constant.
  template <typename F>
  __device__ __forceinline__ void at(int vocab_id, const F& f) const {
    if (first[1] == INT_MAX) return f(of, vocab_id);
    int range = 0;
    while (vocab_id >= first[range + 1]) ++range;
    f(of + range, vocab_id - first[range]);
  }
};
// Boxes are box_rows tokens x 64 vocabulary entries.
inline BlockMaps block_maps(const LogitBlock& block, const VocabRanges& ranges, std::int64_t tokens,
                            int box_rows) {
  BlockMaps maps{};
  const auto put = [&](int r, const void* data, std::int64_t stride) {
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0)
      throw Unsupported("kernel hopper: d_weight: expected an address that is a multiple of 16");
    maps.of[r] = matrix_map(data, DType::bf16, tokens, stride, stride, box_rows);
  };
  if (ranges.count == 0) put(0, block.data, block.stride);
  for (int r = 0; r < ranges.count; ++r) {
    put(r, ranges.data[r], ranges.stride(r));
    maps.first[r] = ranges.first[r];
  }
  maps.first[std::max(ranges.count, 1)] = INT_MAX;
  return maps;
}

}  // namespace logitless::cuda

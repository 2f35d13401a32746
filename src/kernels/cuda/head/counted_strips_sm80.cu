// Strips of gradients over tokens that count, by mma.sync of compute capability 8.0 and later. CTAs
// of four warps have tiles of 128 x 128 sums each (listed_gemm_sm80.cuh). Each element has one
// owner and a fixed order of its sum, so results have the same bits in every run.
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/counted_strips.h"
#include "kernels/cuda/head/listed_gemm_sm80.cuh"

namespace logitless::cuda {
namespace {

static_assert(kStripTile == listed::kTile);

__device__ __forceinline__ listed::Product product_of(const CountedStrip& c) {
  listed::Product p;
  p.rows = c.rows;
  p.columns = c.columns;
  p.contracted = c.contracted;
  p.left = c.block;
  p.left_stride = c.block_stride;
  p.left_width = c.block_columns;
  p.right = c.right;
  p.right_stride = c.right_stride;
  return p;
}

// Writes the results of a tile to rows [0, rows) of `to`.
__device__ __forceinline__ void store_tile(const CountedStrip& c, const float (&z)[128], float* to,
                                           int rows, const listed::Item& item) {
  const int first = item.column + tiles_sm80::column_of(0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = item.row + tiles_sm80::row_of(i / 2, i % 2);
    if (row >= rows) continue;
    float* const at = to + std::int64_t{row} * c.columns + first;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (first + n * 8 >= c.columns) continue;
      auto* const pair = reinterpret_cast<float2*>(at + n * 8);
      const int from = i / 2 * 32 + n * 4 + i % 2 * 2;
      const float2 before = c.adds ? *pair : make_float2(0.0f, 0.0f);
      *pair = {before.x + z[from], before.y + z[from + 1]};
    }
  }
}

// kHidden: a strip of d_hidden; else of d_weight. A thread block for each tile.
template <typename T, bool kHidden>
__global__ void __launch_bounds__(listed::kThreads, 2)
    sum_counted(const __grid_constant__ CountedStrip c) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const auto stages = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int across = (c.columns + listed::kTile - 1) / listed::kTile;
  const int tile = static_cast<int>(blockIdx.x) / across;
  listed::Item item{.result = 0,
                    .row_block = 0,
                    .row = tile * listed::kTile,
                    .column = static_cast<int>(blockIdx.x) % across * listed::kTile};
  listed::Product p = product_of(c);
  float* to = c.sums;
  const CountedRows counted =
      counted_rows(*c.last_active, c.first_token, kHidden ? c.rows : c.contracted);
  if constexpr (kHidden) {
    if (counted.rows == 0) return;
    const int part = item.row / counted.part_rows;
    if (part >= counted.parts) return;
    item.row -= part * counted.part_rows;
    to += std::int64_t{part} * counted.part_rows * c.columns;
    const int blocks = (c.contracted + listed::kBlock - 1) / listed::kBlock;
    const int begin = blocks * part / counted.parts * listed::kBlock;
    const int end = min(c.contracted, blocks * (part + 1) / counted.parts * listed::kBlock);
    p.rows = counted.rows;
    p.left = static_cast<const T*>(c.block) + begin;
    p.right = static_cast<const T*>(c.right) + begin * c.right_stride;
    p.contracted = end - begin;
  } else {
    p.contracted = counted.rows;
    if (c.adds && p.contracted == 0) return;
  }
  float z[128];
  listed::sum_item<T, kHidden>(z, p, item, stages);
  store_tile(c, z, to, p.rows, item);
}

template <typename T, bool kHidden>
void launch(const CountedStrip& c) {
  const auto kernel = sum_counted<T, kHidden>;
  allow_shared(kernel, listed::kSharedBytes);
  const std::int64_t tiles = ceil_div(c.rows, listed::kTile) * ceil_div(c.columns, listed::kTile);
  kernel<<<static_cast<unsigned>(tiles), listed::kThreads, listed::kSharedBytes,
           static_cast<cudaStream_t>(c.stream)>>>(c);
  require_cuda(cudaGetLastError(), "strip of tokens that count");
}

}  // namespace

std::int64_t counted_strip_rows(std::int64_t most, std::int64_t columns) {
  const std::int64_t across = ceil_div(columns, kStripTile);
  const std::int64_t at_once = 2 * std::int64_t{processor_count()};
  std::int64_t found = most;
  if (most % kStripTile != 0) return most;  // of a small head, which has one strip
  double best = 0.0;
  for (std::int64_t rows = most; rows > 0 && rows >= most / 2; rows -= kStripTile) {
    const std::int64_t tiles = ceil_div(rows, kStripTile) * across;
    const double busy =
        static_cast<double>(tiles) / static_cast<double>(ceil_div(tiles, at_once) * at_once);
    if (busy > best) {
      best = busy;
      found = rows;
    }
  }
  return found;
}

void sum_counted_hidden(const CountedStrip& c) {
  c.dtype == DType::f16 ? launch<__half, true>(c) : launch<__nv_bfloat16, true>(c);
}
void sum_counted_weight(const CountedStrip& c) {
  c.dtype == DType::f16 ? launch<__half, false>(c) : launch<__nv_bfloat16, false>(c);
}

}  // namespace logitless::cuda

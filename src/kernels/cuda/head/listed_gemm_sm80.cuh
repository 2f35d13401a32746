// Sums of products over lists of blocks, by mma.sync of compute capability 8.0 and later. A result
// [rows, columns] has row blocks of 256, and its contracted index has blocks of 256. A row block is
// the sum over the contracted blocks that its list names:
//   result [256 rows of r, columns] = sum over listed b of left [r, b] . right [b, columns]
// Row blocks with an empty list are left out. Up to two such results share a launch.
//
// CTAs take items, tiles of 128 x 128 results, from a counter until none is left: row blocks with
// long lists first, all of the first result before the second. An item has one owner and sums its
// list in ascending order, so results have the same bits whoever computes them. Two CTAs share an
// SM: one multiplies while the other finishes a tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/device/tiles_sm80.cuh"
#include "kernels/cuda/head/listed_gemm.h"

namespace logitless::cuda::listed {

using tiles_sm80::kPipelineBytes;
using tiles_sm80::kStep;
using tiles_sm80::kThreads;
using tiles_sm80::kTile;
inline constexpr int kSteps = kBlock / kStep;             // of a contracted block
inline constexpr int kSharedBytes = kPipelineBytes + 16;  // the number of the item lies behind
// Column tiles that row blocks are taken for at a time. Concurrent CTAs share their columns of
// `right` in L2, and each tile of `left` there.
inline constexpr int kBand = 4;

__device__ __forceinline__ int rows_of(const Product& p) {
  return p.counted_rows == nullptr ? p.rows : min(p.rows, *p.counted_rows);
}
__device__ __forceinline__ int contracted_of(const Product& p) {
  return p.counted_contracted == nullptr ? p.contracted : min(p.contracted, *p.counted_contracted);
}

// The contracted blocks that a row block lists, in ascending order.
class Blocks {
 public:
  __device__ __forceinline__ Blocks(const Product& p, int row_block)
      : bits_(p.lists == nullptr ? nullptr
                                 : p.lists + static_cast<std::int64_t>(row_block) * p.list_stride),
        first_(p.first),
        end_(p.first + (contracted_of(p) + kBlock - 1) / kBlock),
        at_(p.first - 1) {
    next();
  }
  __device__ __forceinline__ bool done() const { return at_ >= end_; }
  // First contracted element of the block.
  __device__ __forceinline__ int element() const { return (at_ - first_) * kBlock; }
  __device__ __forceinline__ void next() {
    ++at_;
    while (bits_ != nullptr && at_ < end_) {
      const std::uint32_t rest = __ldg(bits_ + at_ / 32) >> (at_ % 32);
      if (rest != 0) {
        at_ += __ffs(static_cast<int>(rest)) - 1;
        return;
      }
      at_ = at_ / 32 * 32 + 32;
    }
  }

 private:
  const std::uint32_t* bits_;
  int first_, end_, at_;
};

// An item: 128 rows of a row block and 128 columns.
struct Item {
  int result;
  int row_block;
  int row;
  int column;
};
// Returns false behind the last item.
__device__ __forceinline__ bool find_item(const Products& p, int index, Item& item) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_blocks = p.work->row_blocks[r];
    const int tiles = (p.results[r].columns + kTile - 1) / kTile;
    if (index >= row_blocks * 2 * tiles) {
      index -= row_blocks * 2 * tiles;
      continue;
    }
    const int of_band = row_blocks * 2 * kBand;
    const int band = index / of_band;
    const int width = min(kBand, tiles - band * kBand);
    const int rest = index % of_band;
    const int first = r == 0 ? 0 : p.results[0].row_blocks;
    item.result = r;
    item.row_block = p.order[first + rest / (2 * width)];
    item.row = item.row_block * kBlock + rest % 2 * kTile;
    item.column = (band * kBand + rest / 2 % width) * kTile;
    return true;
  }
  return false;
}

// z = the sum of an item. The CTA has passed a barrier since it last read the stages.
template <typename T, bool kSide>
__device__ __forceinline__ void sum_item(float (&z)[128], const Product& p, const Item& item,
                                         std::uint32_t stages) {
  // Rows of `left` are padded with zeros along the contracted index.
  const tiles_sm80::Loader<T, kSide, kSide> left(p.left, p.left_stride, item.row,
                                                 kSide ? rows_of(p) : p.left_width, stages);
  const tiles_sm80::Loader<T, false, false> right(p.right, p.right_stride, item.column, p.columns,
                                                  stages + tiles_sm80::kOperandBytes);
  const std::uint64_t keep = policy_keep();
  const int end = contracted_of(p);
  Blocks blocks(p, item.row_block);
  int step = 0;  // of the block that is loaded
  const auto load = [&](int stage) {
    if (blocks.done()) return false;
    const int k = blocks.element() + step * kStep;
    left.load(stage, k, end, keep);
    right.load(stage, k, end, keep);
    if (++step == kSteps) {
      step = 0;
      blocks.next();
    }
    return true;
  };
  tiles_sm80::multiply_steps<T>(z, tiles_sm80::FragmentReader<kSide, false>(stages), load);
}

// finish.first(z, row, column) and finish.second(...) take a thread's results of an item, whose
// first row and column these are.
template <typename T, class Finish>
__global__ void __launch_bounds__(kThreads, 2)
    sum_products(const __grid_constant__ Products p, const __grid_constant__ Finish finish) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const auto stages = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory));
  volatile int* const next = reinterpret_cast<int*>(shared_memory + kPipelineBytes);
  for (;;) {
    __syncthreads();  // the number before has been read, and the stages
    if (threadIdx.x == 0) *next = atomicAdd(&p.work->next, 1);
    __syncthreads();
    Item item;
    if (!find_item(p, *next, item)) return;
    float z[128];
    if (item.result == 0) {
      if (item.row >= rows_of(p.results[0])) continue;
      sum_item<T, true>(z, p.results[0], item, stages);
      finish.first(z, item.row, item.column);
    } else {
      if (item.row >= rows_of(p.results[1])) continue;
      sum_item<T, false>(z, p.results[1], item, stages);
      finish.second(z, item.row, item.column);
    }
  }
}

// Enqueues the products, and the order of their work before.
template <typename T, class Finish>
void launch_products(const Products& p, const Finish& finish, Stream stream) {
  order_work(p, stream);
  std::int64_t items = 0;
  for (const Product& of : p.results)
    items += std::int64_t{2} * of.row_blocks * ceil_div(of.columns, kTile);
  const auto kernel = sum_products<T, Finish>;
  allow_shared(kernel, kSharedBytes);
  const std::int64_t ctas = std::min<std::int64_t>(2 * processor_count(), items);
  kernel<<<static_cast<unsigned>(ctas), kThreads, kSharedBytes,
           static_cast<cudaStream_t>(stream)>>>(p, finish);
  require_cuda(cudaGetLastError(), "sums of listed products");
}

}  // namespace logitless::cuda::listed

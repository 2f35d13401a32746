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
#include "kernels/cuda/device/mma_sm80.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/listed_gemm.h"

namespace logitless::cuda::listed {

inline constexpr int kThreads = 128;  // four warps of 64 x 64 results each
inline constexpr int kTile = 128;
inline constexpr int kStep = 32;  // along the contracted index
inline constexpr int kStages = 3;
inline constexpr int kSteps = kBlock / kStep;  // of a contracted block
inline constexpr int kOperandBytes = kTile * kStep * 2;
inline constexpr int kStageBytes = 2 * kOperandBytes;
inline constexpr int kItem = kStages * kStageBytes;  // where the number of the item is
inline constexpr int kSharedBytes = kItem + 16;      // two fit into 100 KiB of an SM
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

// Waits until all but the last kGroups groups of the thread's copies are done.
template <int kGroups>
__device__ __forceinline__ void copies_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Place of a 16-byte chunk in a row, so that eight rows at one column are in different banks.
// kSide: rows of kStep elements; others have kTile elements.
template <bool kSide>
__device__ __forceinline__ constexpr int place(int row, int chunk) {
  return kSide ? chunk ^ (row / 2 % 4) : chunk ^ (row % 8);
}

// Copies an operand's part of each step. kSide: the operand [128 rows, contracted] has rows of the
// result; else it is [contracted, 128 columns of it].
template <typename T, bool kSide>
class Loader {
 public:
  // `across`: first row, or column where the contracted index goes down. `limit`: their number.
  __device__ __forceinline__ Loader(const void* data, std::int64_t stride, int across, int limit,
                                    std::uint32_t to)
      : stride_(stride), to_(to + row() * kRowBytes + (place<kSide>(row(), chunk()) << 4)) {
    const int first = across + (kSide ? row() : chunk() * 8);
    from_ = static_cast<const T*>(data) +
            (kSide ? first * stride + chunk() * 8 : row() * stride + first);
    exists_ = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      exists_ |= first + (kSide ? i * kCopyRows : 0) < limit ? 1u << i : 0u;
  }
  // Copies the step from contracted element k on; 0 for elements from `end` on.
  __device__ __forceinline__ void load(int stage, int k, int end, std::uint64_t policy) const {
    const std::uint32_t to = to_ + static_cast<std::uint32_t>(stage * kStageBytes);
    const T* const from = from_ + (kSide ? k : k * stride_);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      // Rows of `left` are padded with zeros along the contracted index.
      const bool inside = kSide || k + row() + i * kCopyRows < end;
      copy_async_if(inside && (exists_ >> i & 1u) != 0, to + i * kCopyRows * kRowBytes,
                    from + i * kCopyRows * stride_, policy);
    }
  }

 private:
  static constexpr int kRowBytes = (kSide ? kStep : kTile) * 2;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kCopyRows = kThreads / kChunks;  // rows that the CTA copies at once
  static constexpr int kCopies = kOperandBytes / (kThreads * 16);
  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ __forceinline__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  std::int64_t stride_;
  std::uint32_t to_;
  const T* from_;
  unsigned exists_;  // a bit for each copy of a step
};

// Operands of a warp for one product of 16 along the contracted index.
struct Fragments {
  std::uint32_t a[4][4];  // of 16 rows each
  std::uint32_t b[4][4];  // of 16 columns each
};
// Reads them. kSide: `left` lies as [rows][contracted], else as [contracted][rows].
template <bool kSide>
class FragmentReader {
 public:
  __device__ __forceinline__ explicit FragmentReader(std::uint32_t stages) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int of_eight = lane % 8, low = lane / 8 % 2, high = lane / 16;
    const int tall = high * 8 + of_eight;  // contracted row of `left`, or of `right` with `low`
    a_ = kSide ? stages + (warp / 2 * 64 + lane % 16) * kStep * 2 +
                     (place<true>(lane % 16, high) << 4)
               : stages + tall * kTile * 2 + (place<false>(tall, warp / 2 * 8 + low) << 4);
    const int deep = low * 8 + of_eight;
    b_ = stages + kOperandBytes + deep * kTile * 2 + (place<false>(deep, warp % 2 * 8 + high) << 4);
  }
  __device__ __forceinline__ void read(Fragments& f, int stage, int part) const {
    const auto at = static_cast<std::uint32_t>(stage * kStageBytes);
    const std::uint32_t down = at + part * 16 * kTile * 2;  // 16 contracted rows further
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kSide) {
        load_matrices<false>(f.a[i], (a_ ^ (part * 32)) + at + i * 16 * kStep * 2);
      } else {
        load_matrices<true>(f.a[i], (a_ ^ (i * 32)) + down);
      }
      load_matrices<true>(f.b[i], (b_ ^ (i * 32)) + down);
    }
  }

 private:
  std::uint32_t a_, b_;
};

// A thread's results: row_of and column_of the tile for register m * 32 + n * 4 + half * 2.
__device__ __forceinline__ int row_of(int m, int half) {
  return static_cast<int>(threadIdx.x / 64 * 64 + threadIdx.x % 32 / 4) + m * 16 + half * 8;
}
__device__ __forceinline__ int column_of(int n) {
  return static_cast<int>(threadIdx.x / 32 % 2 * 64 + threadIdx.x % 4 * 2) + n * 8;
}

template <typename T>
__device__ __forceinline__ void multiply(float (&z)[128], const Fragments& f) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int nn = 0; nn < 8; ++nn) {
      const int n = m % 2 == 0 ? nn : 7 - nn;
      mma<T>(*reinterpret_cast<float(*)[4]>(z + m * 32 + n * 4), f.a[m], f.b[n / 2][n % 2 * 2],
             f.b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

// z = the sum of an item. The CTA has passed a barrier since it last read the stages.
template <typename T, bool kSide>
__device__ __forceinline__ void sum_item(float (&z)[128], const Product& p, const Item& item,
                                         std::uint32_t stages) {
  const Loader<T, kSide> left(p.left, p.left_stride, item.row, kSide ? rows_of(p) : p.left_width,
                              stages);
  const Loader<T, false> right(p.right, p.right_stride, item.column, p.columns,
                               stages + kOperandBytes);
  const FragmentReader<kSide> reader(stages);
  const std::uint64_t keep = policy_keep();
  const int end = contracted_of(p);
  Blocks blocks(p, item.row_block);
  int step = 0;     // of the block that is loaded
  int waiting = 0;  // steps loaded and not multiplied
  const auto load = [&](int stage) {
    if (!blocks.done()) {
      const int k = blocks.element() + step * kStep;
      left.load(stage, k, end, keep);
      right.load(stage, k, end, keep);
      ++waiting;
      if (++step == kSteps) {
        step = 0;
        blocks.next();
      }
    }
    copies_commit();  // of nothing behind the last step
  };
  for (int s = 0; s + 1 < kStages; ++s) load(s);
#pragma unroll
  for (float& value : z) value = 0.0f;
  Fragments fragments[2];
  for (int stage = 0; waiting > 0; --waiting) {
    copies_wait_but<kStages - 2>();
    __syncthreads();
    reader.read(fragments[0], stage, 0);
    load((stage + kStages - 1) % kStages);
    reader.read(fragments[1], stage, 1);
    multiply<T>(z, fragments[0]);
    multiply<T>(z, fragments[1]);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// finish.first(z, row, column) and finish.second(...) take a thread's results of an item, whose
// first row and column these are.
template <typename T, class Finish>
__global__ void __launch_bounds__(kThreads, 2)
    sum_products(const __grid_constant__ Products p, const __grid_constant__ Finish finish) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const auto stages = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory));
  volatile int* const next = reinterpret_cast<int*>(shared_memory + kItem);
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

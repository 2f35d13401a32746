// Building blocks of kernels by mma.sync of compute capability 8.0 and later whose CTAs compute
// tiles of 128 x 128 fp32 sums: copies of operands to stages in shared memory, fragments of warps,
// and the loop over steps. Two CTAs share an SM: one multiplies while the other finishes a tile.
// Generated kernels include it (kernels/device/tile_engine.h), so it needs no header of the host.
#pragma once

#include "kernels/cuda/device/warp_sums_sm80.cuh"

namespace logitless::cuda::tiles_sm80 {

inline constexpr int kThreads = 128;  // four warps of 64 x 64 sums each
inline constexpr int kTile = 128;
inline constexpr int kStep = 32;  // along the contracted index
inline constexpr int kStages = 3;
inline constexpr int kOperandBytes = kTile * kStep * 2;
inline constexpr int kStageBytes = 2 * kOperandBytes;
inline constexpr int kPipelineBytes = kStages * kStageBytes;  // two fit into 100 KiB of an SM

// Place of a 16-byte chunk in a row, so that eight rows at one column are in different banks.
// kSide: rows of kStep elements; others have kTile elements.
template <bool kSide>
__device__ __forceinline__ constexpr int place(int row, int chunk) {
  return kSide ? chunk ^ (row / 2 % 4) : chunk ^ (row % 8);
}

// Copies an operand's part of each step. kSide: the operand [128 rows or columns of the result,
// contracted] has contiguous contracted elements; else it is [contracted, 128 of the result].
// kWhole: the contracted elements are a multiple of kStep, with zeros in memory or without.
template <typename T, bool kSide, bool kWhole>
class Loader {
 public:
  // `across`: first row or column of the result. `limit`: their number.
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
    if (kSide && !kWhole && k + kStep > end) return load_rest(to, from, end - k);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool inside = kSide || kWhole || k + row() + i * kCopyRows < end;
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

  // Copies the last `count` elements of rows, which may end inside of a chunk.
  __device__ __forceinline__ void load_rest(std::uint32_t to, const T* from, int count) const {
    const int left = count - chunk() * 8;
    const int bytes = left <= 0 ? 0 : left < 8 ? 2 * left : 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      copy_async_bytes((exists_ >> i & 1u) != 0 ? bytes : 0, to + i * kCopyRows * kRowBytes,
                       from + i * kCopyRows * stride_);
  }

  std::int64_t stride_;
  std::uint32_t to_;
  const T* from_;
  unsigned exists_;  // a bit for each copy of a step
};

// Reads a warp's operands for a product of 16 along the contracted index. kSideA: the left operand
// lies as [rows][contracted], else as [contracted][rows]; kSideB: the right one as
// [columns][contracted], else as [contracted][columns].
template <bool kSideA, bool kSideB>
class FragmentReader {
 public:
  __device__ __forceinline__ explicit FragmentReader(std::uint32_t stages) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int of_eight = lane % 8, low = lane / 8 % 2, high = lane / 16;
    const int tall = high * 8 + of_eight;  // contracted row of `a`, or column of a kSideB
    a_ = kSideA ? stages + (warp / 2 * 64 + lane % 16) * kStep * 2 +
                      (place<true>(lane % 16, high) << 4)
                : stages + tall * kTile * 2 + (place<false>(tall, warp / 2 * 8 + low) << 4);
    const int deep = low * 8 + of_eight;
    b_ = stages + kOperandBytes +
         (kSideB ? (warp % 2 * 64 + tall) * kStep * 2 + (place<true>(tall, low) << 4)
                 : deep * kTile * 2 + (place<false>(deep, warp % 2 * 8 + high) << 4));
  }
  __device__ __forceinline__ void read(WarpOperands& f, int stage, int part) const {
    const auto at = static_cast<std::uint32_t>(stage * kStageBytes);
    const std::uint32_t down = at + part * 16 * kTile * 2;  // 16 contracted rows further
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kSideA) {
        load_matrices<false>(f.a[i], (a_ ^ (part * 32)) + at + i * 16 * kStep * 2);
      } else {
        load_matrices<true>(f.a[i], (a_ ^ (i * 32)) + down);
      }
      if constexpr (kSideB) {
        load_matrices<false>(f.b[i], (b_ ^ (part * 32)) + at + i * 16 * kStep * 2);
      } else {
        load_matrices<true>(f.b[i], (b_ ^ (i * 32)) + down);
      }
    }
  }

 private:
  std::uint32_t a_, b_;
};

// A thread's sums: row_of and column_of the tile for register m * 32 + n * 4 + half * 2.
__device__ __forceinline__ int row_of(int m, int half) {
  return static_cast<int>(threadIdx.x / 64 * 64 + threadIdx.x % 32 / 4) + m * 16 + half * 8;
}
__device__ __forceinline__ int column_of(int n) {
  return static_cast<int>(threadIdx.x / 32 % 2 * 64 + threadIdx.x % 4 * 2) + n * 8;
}

// z += the sums of a tile. load(stage) enqueues the copies of the next step, and returns false if
// there is none. The CTA has passed a barrier since it last read the stages.
template <typename T, class Reader, class Load>
__device__ __forceinline__ void add_steps(float (&z)[128], const Reader& reader, const Load& load) {
  int waiting = 0;  // steps loaded and not multiplied
  const auto next = [&](int stage) {
    if (load(stage)) ++waiting;
    copies_commit();  // of nothing behind the last step
  };
  for (int s = 0; s + 1 < kStages; ++s) next(s);
  WarpOperands fragments[2];
  for (int stage = 0; waiting > 0; --waiting) {
    copies_wait_but<kStages - 2>();
    __syncthreads();
    reader.read(fragments[0], stage, 0);
    next((stage + kStages - 1) % kStages);
    reader.read(fragments[1], stage, 1);
    multiply<T>(z, fragments[0]);
    multiply<T>(z, fragments[1]);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// z = the sums of a tile.
template <typename T, class Reader, class Load>
__device__ __forceinline__ void multiply_steps(float (&z)[128], const Reader& reader,
                                               const Load& load) {
#pragma unroll
  for (float& value : z) value = 0.0f;
  add_steps<T>(z, reader, load);
}

}  // namespace logitless::cuda::tiles_sm80

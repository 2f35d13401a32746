// Epilogue of targets: adds rows of hidden to d_weight and rows of the weight to d_hidden, to a
// tile in registers. These sums are in fp32 and separate from the GEMM.
#pragma once

#include "kernels/cuda/device/mma_sm80.cuh"
#include "kernels/cuda/device/tiles_sm90.cuh"
#include "kernels/cuda/head/gradient_tiles_sm90.cuh"

namespace logitless::cuda {

// Loads of two columns, 8 apart, that a thread keeps in flight for its part of a row of floats.
inline constexpr int kFloatLoads = 8;
__device__ __forceinline__ void load_floats(float2 (&v)[kFloatLoads], int part, const float* row,
                                            int column, int columns) {
#pragma unroll
  for (int i = 0; i < kFloatLoads; ++i) {
    const int c = column + (part * kFloatLoads + i) * 8;
    v[i] = c < columns ? *reinterpret_cast<const float2*>(row + c) : make_float2(0.0f, 0.0f);
  }
}
// z (half h of a thread's rows) += factor * row. The thread's columns of the row start at `column`.
__device__ __forceinline__ void add_floats(float (&z)[128], int h, float factor, const float* row,
                                           int column, int columns) {
#pragma unroll
  for (int part = 0; part < 32 / kFloatLoads; ++part) {
    float2 v[kFloatLoads];
    load_floats(v, part, row, column, columns);
#pragma unroll
    for (int i = 0; i < kFloatLoads; ++i) {
      float& low = z[4 * (part * kFloatLoads + i) + 2 * h];
      float& high = z[4 * (part * kFloatLoads + i) + 2 * h + 1];
      low = fmaf(factor, v[i].x, low);
      high = fmaf(factor, v[i].y, high);
    }
  }
}
// The same with one row for both halves.
__device__ __forceinline__ void add_floats(float (&z)[128], const float (&factors)[2],
                                           const float* row, int column, int columns) {
#pragma unroll
  for (int part = 0; part < 32 / kFloatLoads; ++part) {
    float2 v[kFloatLoads];
    load_floats(v, part, row, column, columns);
#pragma unroll
    for (int i = 0; i < 2 * kFloatLoads; ++i) {
      float* const two = z + 4 * (part * kFloatLoads + i / 2) + i % 2 * 2;
      two[0] = fmaf(factors[i % 2], v[i / 2].x, two[0]);
      two[1] = fmaf(factors[i % 2], v[i / 2].y, two[1]);
    }
  }
}

// Adds the targets of a warp's 16 rows of results. Several rows of the other matrix at a time are
// copied to shared memory, all in flight at once. One load of the warp copies a row. When each
// thread loaded the rows of its own two results serially, the longest chain stalled both CTAs'
// GEMMs (a sixth of d_weight's time).
//
// kHidden: tokens of d_hidden get rows of the weight. Otherwise vocabulary entries of d_weight get
// the rows of hidden of their targets. kFar: a vocabulary block of the far field, indexed by
// position.
template <typename T, bool kHidden, bool kFar>
class TargetRows {
 public:
  // Takes the warp's first row. Construct it before a tile's mainloop, which hides the loads here.
  __device__ __forceinline__ TargetRows(const GradientArguments& a, int row) {
    row += lane();
    if (lane() >= kResults || row >= (kHidden ? a.hidden : a.weight).rows) return;
    if constexpr (kHidden) {
      count_ = a.targets_per_token;
      begin_ = row * count_;
    } else {
      const int vocab_id = kFar ? __ldg(a.far.order_vocab + row) : row;
      begin_ = __ldg(a.entry_begin + vocab_id);
      count_ = __ldg(a.entry_begin + vocab_id + 1) - begin_;
    }
  }

  // z += their parts, in order. `memory`: TileWriter::memory_of_warp; `tile_column`: first column
  // of the tile.
  __device__ __forceinline__ void add_to(float (&z)[128], const GradientArguments& a,
                                         unsigned char* memory, int tile_column) const {
    if (__all_sync(kAll, count_ == 0)) return;
    const int found = summed_apart(count_) ? 0 : count_;
    int slot = found;  // slots of the warp: prefix sums over its results
#pragma unroll
    for (int by = 1; by < kResults; by *= 2) {
      const int before = __shfl_up_sync(kAll, slot, by);
      if (lane() >= by) slot += before;
    }
    const int slots = __shfl_sync(kAll, slot, kResults - 1);
    slot -= found;          // the lane's first slot
    int first[2], last[2];  // slots of the thread's two rows
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int result = lane() / 4 + 8 * h;
      first[h] = __shfl_sync(kAll, slot, result);
      last[h] = first[h] + __shfl_sync(kAll, found, result);
      if constexpr (!kHidden) {
        const int begin = __shfl_sync(kAll, begin_, result);
        if (summed_apart(__shfl_sync(kAll, count_, result))) {
          const std::int64_t row = begin / (kFewEntries + 1);
          add_floats(z, h, 1.0f, a.many + row * a.weight.columns,
                     tile_column + accumulator_column(), a.weight.columns);
        }
      }
    }
    for (int from = 0; from < slots; from += kRows) {
      const int to = min(from + kRows, slots);
      load_rows(a, entry_of(from + lane(), slot), to - from, memory, tile_column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int s = max(first[h], from); s < min(last[h], to); ++s)
          add_row(z, h, memory, s - from);
      }
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kResults = 16;
  static constexpr int kRows = 7;  // rows copied at a time
  // padded, so that rows start in different banks
  static constexpr int kRowBytes = kTileColumns * 2 + 16;
  static constexpr int kCoefficients = kRows * kRowBytes;  // offset of the rows' float coefficients
  static_assert(kCoefficients + kRows * 4 <= TileWriter::kWarpBytes);

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ __forceinline__ bool summed_apart(int count) {
    return !kHidden && count > kFewEntries;
  }

  // Returns the entry of a slot, which may differ from lane to lane. `slot_of_result`: in lanes
  // below 16.
  __device__ __forceinline__ int entry_of(int slot, int slot_of_result) const {
    int result = 0;
#pragma unroll
    for (int r = 1; r < kResults; ++r)
      result += __shfl_sync(kAll, slot_of_result, r) <= slot ? 1 : 0;
    return __shfl_sync(kAll, begin_, result) + slot - __shfl_sync(kAll, slot_of_result, result);
  }

  // Copies the rows of the lanes' first `count` entries. Rows of coefficient 0 may not exist: they
  // are not copied.
  static __device__ __forceinline__ void load_rows(const GradientArguments& a, int entry, int count,
                                                   unsigned char* memory, int tile_column) {
    const int column = tile_column + lane() * 8;
    const int columns = (kHidden ? a.hidden : a.weight).columns - column;
    const T* const rows = static_cast<const T*>(kHidden ? a.weight_rows : a.hidden_rows) + column;
    const std::int64_t stride = kHidden ? a.weight_stride : a.hidden_stride;
    int row = 0;
    float coefficient = 0.0f;
    __syncwarp();  // the previous contents have been read
    if (lane() < count) {
      coefficient = __ldg((kHidden ? a.coefficient : a.entry_coefficient) + entry);
      row = kHidden ? __ldg(a.vocab_ids + entry) - a.vocab_begin : __ldg(a.entry_token + entry);
      *reinterpret_cast<float*>(memory + kCoefficients + lane() * 4) = coefficient;
    }
    const unsigned wanted = __ballot_sync(kAll, coefficient != 0.0f);
    for (int j = 0; j < count; ++j) {
      const std::int64_t from = __shfl_sync(kAll, row, j);
      if ((wanted >> j & 1u) != 0)
        copy_eight(memory + j * kRowBytes + lane() * 16, rows + from * stride, columns);
    }
    copies_wait();
    __syncwarp();
  }
  // Copies up to 8 of the remaining `columns` of a row, an even number.
  static __device__ __forceinline__ void copy_eight(unsigned char* to, const T* from, int columns) {
    if (columns >= 8) return copy_16_bytes(to, from);
    for (int c = 0; c < columns; c += 2)
      *reinterpret_cast<unsigned*>(to + c * 2) = *reinterpret_cast<const unsigned*>(from + c);
  }
  static __device__ __forceinline__ void add_row(float (&z)[128], int h,
                                                 const unsigned char* memory, int slot) {
    const float factor = *reinterpret_cast<const float*>(memory + kCoefficients + slot * 4);
    if (factor == 0.0f) return;
    const unsigned char* const row = memory + slot * kRowBytes + lane() % 4 * 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2 f = pair_of<T>(*reinterpret_cast<const unsigned*>(row + i * 16));
      float& low = z[4 * i + 2 * h];
      float& high = z[4 * i + 2 * h + 1];
      low = fmaf(factor, f.x, low);
      high = fmaf(factor, f.y, high);
    }
  }

  int begin_ = 0;  // in lanes below 16: first entry or target of their result
  int count_ = 0;
};
struct NoTargetRows {
  __device__ __forceinline__ NoTargetRows(const GradientArguments&, int) {}
};

}  // namespace logitless::cuda

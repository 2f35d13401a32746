// What targets add to a tile of results in registers: rows of hidden to d_weight, rows of the
// weight to d_hidden, in fp32 and apart from the products.
#pragma once

#include "kernels/cuda/device/tiles_sm90.cuh"
#include "kernels/cuda/head/gradient_tiles_sm90.cuh"

namespace logitless::cuda {

// z (the half h of a thread's rows) += factor * row, of which columns from `column` on are the
// thread's. The loads come before the sums, many at a time.
template <int kLoads = 16>
__device__ __forceinline__ void add_row(float (&z)[128], int h, float factor,
                                        const __nv_bfloat16* row, int column, int columns) {
#pragma unroll
  for (int part = 0; part < 32 / kLoads; ++part) {
    __nv_bfloat162 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int c = column + (part * kLoads + i) * 8;  // columns are even
      v[i] = c < columns ? __ldg(reinterpret_cast<const __nv_bfloat162*>(row + c))
                         : __nv_bfloat162(__nv_bfloat16_raw{0}, __nv_bfloat16_raw{0});
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float2 f = __bfloat1622float2(v[i]);
      float& low = z[4 * (part * kLoads + i) + 2 * h];
      float& high = z[4 * (part * kLoads + i) + 2 * h + 1];
      low = fmaf(factor, f.x, low);
      high = fmaf(factor, f.y, high);
    }
  }
}

// z (the half h of a thread's rows) += factor * row, in fp32; likewise many loads at a time.
__device__ __forceinline__ void add_floats(float (&z)[128], int h, float factor, const float* row,
                                           int column, int columns) {
  constexpr int kLoads = 8;
#pragma unroll
  for (int part = 0; part < 32 / kLoads; ++part) {
    float2 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int c = column + (part * kLoads + i) * 8;
      v[i] = c < columns ? *reinterpret_cast<const float2*>(row + c) : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float& low = z[4 * (part * kLoads + i) + 2 * h];
      float& high = z[4 * (part * kLoads + i) + 2 * h + 1];
      low = fmaf(factor, v[i].x, low);
      high = fmaf(factor, v[i].y, high);
    }
  }
}

// z (the half h) += the targets' part of a word's row, its entries [begin, end).
__device__ __forceinline__ void add_entries(float (&z)[128], int h, const GradientArguments& a,
                                            int begin, int end, int column) {
  const int columns = a.weight.columns;
  if (end - begin > kFewEntries) {
    const std::int64_t row = begin / (kFewEntries + 1);
    return add_floats(z, h, 1.0f, a.many + row * columns, column, columns);
  }
  for (int e = begin; e < end; ++e) {
    add_row(z, h, a.entry_coefficient[e], a.hidden_rows + a.entry_token[e] * a.hidden_stride,
            column, columns);
  }
}
__device__ __forceinline__ void add_entries_of(float (&z)[128], int h, const GradientArguments& a,
                                               int word, int column) {
  add_entries(z, h, a, a.entry_begin[word], a.entry_begin[word + 1], column);
}

// To shared memory, without registers on the way; there for this thread after copies_wait().
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The entries of a warp's 16 words. Rows of hidden come to shared memory some at a time, all of
// these at once and each by one load of the warp: where each thread loaded the rows of its own two
// words one after the other, the longest of these chains held up both CTAs' products (a sixth of
// d_weight's time).
class WarpEntries {
 public:
  // Of shared memory, for a warp.
  static constexpr int kBytes = 4096;

  // The warp's first word. Before a tile's products, so that it is there after them.
  __device__ __forceinline__ WarpEntries(const GradientArguments& a, int row)
      : border_(__ldg(a.entry_begin + min(row + min(lane(), 16), a.weight.rows))) {}

  // z += the entries' parts, in their order. `memory`: kBytes of the warp's; `tile_column`: the
  // tile's first.
  __device__ __forceinline__ void add_to(float (&z)[128], const GradientArguments& a,
                                         unsigned char* memory, int tile_column) const {
    const int last = __shfl_sync(kAll, border_, 16);
    int from = __shfl_sync(kAll, border_, 0);
    if (from == last) return;
    const int next = __shfl_down_sync(kAll, border_, 1);
    const bool many = lane() < 16 && next - border_ > kFewEntries;
    int begin[2], end[2];  // of the thread's two words, without what is summed apart
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      begin[h] = __shfl_sync(kAll, border_, lane() / 4 + 8 * h);
      end[h] = __shfl_sync(kAll, next, lane() / 4 + 8 * h);
      if (end[h] - begin[h] <= kFewEntries) continue;
      const std::int64_t row = begin[h] / (kFewEntries + 1);
      add_floats(z, h, 1.0f, a.many + row * a.weight.columns, tile_column + accumulator_column(),
                 a.weight.columns);
      end[h] = begin[h];
    }
    while (from < last) {
      const unsigned apart = __ballot_sync(kAll, many && border_ <= from && from < next);
      if (apart != 0) {
        from = __shfl_sync(kAll, next, __ffs(static_cast<int>(apart)) - 1);
        continue;
      }
      const int to = min(from + kRows, last);
      load_rows(a, from, to - from, memory, tile_column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int e = max(begin[h], from); e < min(end[h], to); ++e) add_row(z, h, memory, e - from);
      }
      from = to;
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kRows = 7;                          // at a time
  static constexpr int kRowBytes = kTileColumns * 2 + 16;  // in other banks than the one before
  static constexpr int kCoefficients = kRows * kRowBytes;  // floats, after the rows
  static_assert(kCoefficients + kRows * 4 <= kBytes);

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

  static __device__ __forceinline__ void load_rows(const GradientArguments& a, int from, int count,
                                                   unsigned char* memory, int tile_column) {
    const int column = tile_column + lane() * 8;
    int token = 0;
    __syncwarp();  // what was there before has been read
    if (lane() < count) {
      token = __ldg(a.entry_token + from + lane());
      *reinterpret_cast<float*>(memory + kCoefficients + lane() * 4) =
          __ldg(a.entry_coefficient + from + lane());
    }
    for (int j = 0; j < count; ++j) {
      const std::int64_t row = __shfl_sync(kAll, token, j);
      copy_eight(memory + j * kRowBytes + lane() * 16,
                 a.hidden_rows + row * a.hidden_stride + column, a.weight.columns - column);
    }
    copies_wait();
    __syncwarp();
  }
  // Of a row's columns from here on, of which there are so many: an even number.
  static __device__ __forceinline__ void copy_eight(unsigned char* to, const __nv_bfloat16* from,
                                                    int columns) {
    if (columns >= 8) return copy_16_bytes(to, from);
    for (int c = 0; c < columns; c += 2)
      *reinterpret_cast<__nv_bfloat162*>(to + c * 2) =
          *reinterpret_cast<const __nv_bfloat162*>(from + c);
  }
  static __device__ __forceinline__ void add_row(float (&z)[128], int h,
                                                 const unsigned char* memory, int slot) {
    const float factor = *reinterpret_cast<const float*>(memory + kCoefficients + slot * 4);
    const unsigned char* const row = memory + slot * kRowBytes + lane() % 4 * 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2 f = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(row + i * 16));
      float& low = z[4 * i + 2 * h];
      float& high = z[4 * i + 2 * h + 1];
      low = fmaf(factor, f.x, low);
      high = fmaf(factor, f.y, high);
    }
  }

  int border_;  // of lanes to 16: where the entries of their word begin
};
struct NoEntries {
  __device__ __forceinline__ NoEntries(const GradientArguments&, int) {}
};

}  // namespace logitless::cuda

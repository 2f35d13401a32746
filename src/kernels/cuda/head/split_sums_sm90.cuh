// Running sums of a 16-bit d_weight over chunks of tokens: 16 bits of each in d_weight's own
// memory, 8 in the workspace. Between chunks the memory of a consumer's 64 x 256 results holds its
// sums in register order (TileWriter::OrderedPosition), so that reads are full cache lines. The
// last chunk writes them rounded and in row-major order.
#pragma once

#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/device/tiles_sm90.cuh"
#include "kernels/device/gradient.h"
#include "math/split_sum.h"

namespace logitless::cuda {

// Split sums of one launch.
struct SplitSums {
  RunningSums running;
  std::uint16_t* high;  // d_weight from the launch's first vocabulary entry on
  std::int64_t stride;  // in elements
};

// Bytes of `low` for a tile of a CTA, 128 x 256.
inline constexpr int kSplitTileBytes = kTileRows * kTileColumns;

__device__ __forceinline__ std::uint8_t* low_tile(const SplitSums& s, int row_tile, int column_tile,
                                                  int column_tiles) {
  return s.running.low +
         (static_cast<std::int64_t>(row_tile) * column_tiles + column_tile) * kSplitTileBytes;
}

// Prefetches a CTA's tile of sums into L2, long before they are added.
__device__ __forceinline__ void prefetch_sums(const SplitSums& s, const CUtensorMap* high,
                                              int row_tile, int column_tile, int column_tiles) {
  for (int y = 0; y < kTileRows; y += 64) {
    for (int x = 0; x < kTileColumns; x += 64)
      tma_prefetch(high, column_tile * kTileColumns + x, row_tile * kTileRows + y);
  }
  bulk_prefetch(low_tile(s, row_tile, column_tile, column_tiles), kSplitTileBytes);
}

// Returns true if the sums of a cluster's tile are loaded through two pipeline stages, one for each
// consumer, after those of the mainloop. The 16-bit halves (64 x 256) are in a stage's column part,
// the bytes in its row part.
__device__ __forceinline__ bool stages_sums(const SplitSums& s, int rows, int columns, int pair,
                                            int column_tile) {
  return s.running.from == SumsFrom::sums && (pair + 1) * kClusterRows <= rows &&
         (column_tile + 1) * kTileColumns <= columns;
}
__device__ __forceinline__ void load_sums(const TileMemory& memory, StageCursor& at,
                                          const SplitSums& s, const CUtensorMap* high, int row_tile,
                                          int column_tile, int column_tiles) {
  static_assert(kColumnBytes == 4 * kBoxBytes && kRowBytes == kSplitTileBytes / 2);
  const std::uint8_t* const low = low_tile(s, row_tile, column_tile, column_tiles);
  for (int half = 0; half < 2; ++half) {
    std::uint64_t* const full = memory.full + at.stage;
    barrier_wait(memory.empty + at.stage, at.phase ^ 1);
    barrier_expect(full, kStageBytes);
    for (int b = 0; b < 4; ++b) {
      tma_load(memory.columns + at.stage * kColumnBytes + b * kBoxBytes, high, full,
               column_tile * kTileColumns + b * 64, row_tile * kTileRows + half * 64);
    }
    bulk_load(memory.rows + at.stage * kRowBytes, low + half * kRowBytes, kRowBytes, full);
    at.advance();
  }
}

// Sums of a consumer, 64 x 256. Register 4 i + 2 h + j: accumulator_row, accumulator_column.
class TileSums {
 public:
  // The tile is part of a matrix of rows x columns.
  __device__ __forceinline__ TileSums(const SplitSums& s, int rows, int columns, int row_tile,
                                      int column_tile, int column_tiles)
      : stride_(s.stride),
        rows_(rows - row_tile * kTileRows - consumer() * 64),
        columns_(columns - column_tile * kTileColumns),
        high_(s.high + (row_tile * kTileRows + consumer() * 64) * s.stride +
              column_tile * kTileColumns),
        low_(low_tile(s, row_tile, column_tile, column_tiles) +
             consumer() * (kSplitTileBytes / 2)) {}

  __device__ __forceinline__ std::uint8_t* low() const { return low_; }

  // Registers 16 g to 16 g + 15: pairs of 16 bits, and a byte for each.
  struct Group {
    unsigned high[8];
    uint4 low;
  };
  template <bool kInPlace, bool kLow>
  __device__ __forceinline__ Group load(int g) const {
    Group out;
    if constexpr (kInPlace) {
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const int row =
            static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) + w % 2 * 8;
        const int column = (4 * g + w / 2) * 8 + static_cast<int>(threadIdx.x % 4) * 2;
        const bool inside = row < rows_ && column < columns_;
        out.high[w] =
            inside ? __ldcg(reinterpret_cast<const unsigned*>(high_ + row * stride_ + column)) : 0;
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const TileWriter::OrderedPosition at(g % 2 * 2 + k);
        const uint4 words = __ldcg(
            reinterpret_cast<const uint4*>(high_ + at.row * stride_ + g / 2 * 64 + at.chunk * 8));
        out.high[4 * k] = words.x;
        out.high[4 * k + 1] = words.y;
        out.high[4 * k + 2] = words.z;
        out.high[4 * k + 3] = words.w;
      }
    }
    out.low = kLow
                  ? __ldcg(reinterpret_cast<const uint4*>(low_ + g * 2048 + threadIdx.x % 128 * 16))
                  : make_uint4(0, 0, 0, 0);
    return out;
  }

 private:
  static __device__ __forceinline__ int consumer() {
    return static_cast<int>(threadIdx.x / 128) - 1;
  }

  std::int64_t stride_;
  int rows_, columns_;  // counted from the consumer's first on
  std::uint16_t* high_;
  std::uint8_t* low_;
};

// Returns the bits of a sum, of which the upper 24 are kept. For bf16 they are those of its fp32
// (math/split_sum.h). For f16 they are a sign, 5 bits of exponent and 18 after the binary point:
// those of sum 2^-112, without three 0 bits of the exponent. Sums above kMost are infinite in f16.
template <typename T>
__device__ __forceinline__ unsigned bits_of_sum(float sum) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr float kMost = 65520.0f;
  if constexpr (kHalf) {
    sum = sum > kMost ? kMost : sum < -kMost ? -kMost : sum;  // NaN stays
    sum *= 0x1p-112f;
  }
  // Not __float_as_uint: the compiler would keep z as integers throughout and serialise the wgmmas
  // (ptxas warning C7520).
  unsigned bits;
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(sum));
  return kHalf ? (bits & 0x80000000u) | (bits << 3 & 0x7fffffffu) : bits;
}
template <typename T>
__device__ __forceinline__ float sum_of_bits(unsigned bits) {
  if constexpr (std::is_same_v<T, __half>) {
    const bool is_nan = (bits & 0x7fffff00u) == 0x7fffff00u;
    const float small = __uint_as_float((bits & 0x80000000u) | (bits & 0x7fffffffu) >> 3);
    return is_nan ? __uint_as_float(0x7fffffffu) : small * 0x1p112f;
  } else {
    return __uint_as_float(bits);
  }
}

// The sum of half `kElement % 2` of a pair and byte kElement of `low`, whose bits are repeated in
// those that were dropped.
template <typename T, int kElement>
__device__ __forceinline__ float joined(unsigned pair, unsigned low) {
  // Byte indices of pair (0 to 3) and low (4 to 7): the two low bytes of the result are both the
  // byte of `low`.
  constexpr unsigned kByte = 4 + kElement;
  constexpr unsigned kHalf = kElement % 2 == 0 ? 0x1000 : 0x3200;
  return sum_of_bits<T>(__byte_perm(pair, low, kHalf | kByte << 4 | kByte));
}

template <typename T>
__device__ __forceinline__ void add_four(float* four, unsigned upper, unsigned lower,
                                         unsigned low) {
  four[0] += joined<T, 0>(upper, low);
  four[1] += joined<T, 1>(upper, low);
  four[2] += joined<T, 2>(lower, low);
  four[3] += joined<T, 3>(lower, low);
}

__device__ __forceinline__ unsigned part_of(const uint4& v, int q) {
  return q == 0 ? v.x : q == 1 ? v.y : q == 2 ? v.z : v.w;
}

// z += the sums in d_weight and low (kLow), or the numbers T of d_weight alone.
template <typename T, bool kInPlace, bool kLow>
__device__ __forceinline__ void add_sums(float (&z)[128], const TileSums& sums) {
  constexpr int kGroups = 8;
  constexpr int kAhead = 3;  // groups with loads in flight
  TileSums::Group groups[kGroups];
#pragma unroll
  for (int g = 0; g < kAhead; ++g) groups[g] = sums.load<kInPlace, kLow>(g);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float* const four = z + 16 * g + 4 * q;
      const unsigned upper = groups[g].high[2 * q];
      const unsigned lower = groups[g].high[2 * q + 1];
      if constexpr (kLow) {
        add_four<T>(four, upper, lower, part_of(groups[g].low, q));
      } else {
        const float2 first = pair_of<T>(upper);
        const float2 second = pair_of<T>(lower);
        four[0] += first.x;
        four[1] += first.y;
        four[2] += second.x;
        four[3] += second.y;
      }
    }
    if (g + kAhead < kGroups) groups[g + kAhead] = sums.load<kInPlace, kLow>(g + kAhead);
  }
}

// z += the sums that load_sums has loaded.
template <typename T>
__device__ __forceinline__ void add_staged(float (&z)[128], const TileMemory& memory,
                                           StageCursor& at) {
  const int consumer = static_cast<int>(threadIdx.x / 128) - 1;
  int stages[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // waits for both: no phase of a barrier may be skipped
    barrier_wait(memory.full + at.stage, at.phase);
    stages[half] = at.stage;
    at.advance();
  }
  const int mine = consumer == 0 ? stages[0] : stages[1];
  const unsigned char* const high = memory.columns + mine * kColumnBytes;
  const unsigned char* const low = memory.rows + mine * kRowBytes + threadIdx.x % 128 * 16;
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(low + g * 2048);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const TileWriter::OrderedPosition place(g % 2 * 2 + k);
      const uint4 words = *reinterpret_cast<const uint4*>(
          high + g / 2 * kBoxBytes + place.row * 128 + ((place.chunk ^ (place.row & 7)) << 4));
      add_four<T>(z + 16 * g + 8 * k, words.x, words.y, k == 0 ? bytes.x : bytes.z);
      add_four<T>(z + 16 * g + 8 * k + 4, words.z, words.w, k == 0 ? bytes.y : bytes.w);
    }
  }
  __syncwarp();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (lane < kClusterCtas) barrier_arrive_at(memory.empty + stages[half], lane);
}

// z += the running sums. Afterwards any thread or TMA may overwrite the memory that was read.
// `whole`: the CTA's tile is full. In a clipped tile the 16-bit halves stay in row-major order.
template <typename T>
__device__ __forceinline__ void add_running(float (&z)[128], const SplitSums& s,
                                            const TileSums& sums, bool whole) {
  if (s.running.from == SumsFrom::nothing) return;
  if (s.running.from == SumsFrom::output) {
    add_sums<T, true, false>(z, sums);
  } else if (whole) {
    add_sums<T, false, true>(z, sums);
  } else {
    add_sums<T, true, true>(z, sums);
  }
  __threadfence_block();
  proxy_fence();
}

// (column, row): position of the consumer's first element.
template <typename T>
__device__ __forceinline__ void put_running(const float (&z)[128], TileWriter& writer,
                                            const TileSums& sums, bool whole,
                                            const CUtensorMap* map, int column, int row) {
  const auto bits = [&](int at) { return bits_of_sum<T>(z[at]); };
  writer.put_words(
      [&](int b, int w) {
        return __byte_perm(bits(32 * b + 2 * w), bits(32 * b + 2 * w + 1), 0x7632);
      },
      whole, map, column, row);
  writer.put_bytes(
      [&](int g) {
        unsigned low[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int at = 16 * g + 4 * q;
          low[q] = __byte_perm(__byte_perm(bits(at), bits(at + 1), 0x0051),
                               __byte_perm(bits(at + 2), bits(at + 3), 0x0051), 0x5410);
        }
        return make_uint4(low[0], low[1], low[2], low[3]);
      },
      sums.low());
}

}  // namespace logitless::cuda

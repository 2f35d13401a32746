// Building blocks of the persistent tile kernels: the operand pipeline in shared memory, and the
// epilogue's store of a tile from registers to memory.
//
// A cluster of two CTAs computes 256 x 256 results, each CTA 128 x 256. The kernels are
// warp-specialised. One producer warp issues TMA loads into a 4-stage pipeline, with steps of 64
// along the contracted dimension. Two consumer warpgroups run wgmma on 64 x 256 fp32 accumulators
// each. While one runs its epilogue, the other keeps the tensor cores busy. Both CTAs read the same
// column operand: each loads half of it and multicasts it to both.
#pragma once

#include <type_traits>

#include "kernels/cuda/device/sm90.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/device/tile_sizes.h"

namespace logitless::cuda {

inline constexpr int kStages = 4;
inline constexpr int kRowBytes = kTileRows * kStep * 2;  // one stage of the row operand
inline constexpr int kColumnBytes = kTileColumns * kStep * 2;
inline constexpr int kStageBytes = kRowBytes + kColumnBytes;
inline constexpr int kTileThreads = 384;
// One TMA store: 64 rows of 128 bytes, swizzled.
inline constexpr int kBoxBytes = 64 * 128;
inline constexpr int kBoxesPerConsumer = 2;
// Stages, boxes, barriers, and padding to align to the swizzle's 1024 bytes.
inline constexpr int kTileShared =
    kStages * kStageBytes + 2 * kBoxesPerConsumer * kBoxBytes + 2 * kStages * 8 + 1024;

// Shared memory of a CTA. row_bytes: one stage of the row operand; box_bytes: all boxes.
struct TileMemory {
  __device__ __forceinline__ explicit TileMemory(unsigned char* raw, int row_bytes = kRowBytes,
                                                 int box_bytes = 2 * kBoxesPerConsumer * kBoxBytes)
      : rows(reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) &
                                              ~std::uintptr_t{1023})),
        columns(rows + kStages * row_bytes),
        boxes(columns + kStages * kColumnBytes),
        full(reinterpret_cast<std::uint64_t*>(boxes + box_bytes)),
        empty(full + kStages) {}
  __device__ __forceinline__ void init_barriers(int consumers = 2) const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        barrier_init(full + s, 1);
        barrier_init(empty + s, 4 * consumers * kClusterCtas);  // the warps of both CTAs
      }
      barrier_init_fence();
    }
    cluster_sync();
  }
  unsigned char* rows;
  unsigned char* columns;
  unsigned char* boxes;
  std::uint64_t* full;
  std::uint64_t* empty;
};

// The current pipeline stage and its phase.
struct StageCursor {
  int stage = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Keeps the clusters of a launch close together, so that operands that several of them read come
// from DRAM once. No cluster begins a stretch of steps before all have loaded the one before the
// last. Waits are bounded: if not all clusters are resident, only the pacing is lost.
class Pace {
 public:
  // counters: 0 before the launch, one for each stretch; null: no pacing.
  __device__ __forceinline__ explicit Pace(unsigned* counters)
      : counters_(counters), leads_(counters != nullptr && cluster_rank() == 0) {}
  __device__ __forceinline__ void loaded(int stretch) const {
    if (leads_) atomicAdd(counters_ + stretch, 1u);
  }
  __device__ __forceinline__ void wait(int stretch, int clusters) const {
    if (!leads_) return;  // its partner holds it back
    const volatile unsigned* const counter = counters_ + stretch;
    for (int i = 0; i < 1000 && *counter < static_cast<unsigned>(clusters); ++i) __nanosleep(40);
  }

 private:
  unsigned* counters_;
  bool leads_;
};

// Register 4 i + 2 h + j of a thread's accumulators is row lane / 4 + 8 h of its warp's 16 and
// column 8 i + 2 (lane % 4) + j of the tile.
__device__ __forceinline__ int accumulator_row() {  // row of 128, for h = 0
  return (threadIdx.x / 128 - 1) * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int accumulator_column() { return threadIdx.x % 4 * 2; }

// Stores 64 x 256 tiles of one consumer warpgroup by TMA, in double-buffered boxes of 64 rows x 128
// bytes.
class TileWriter {
 public:
  __device__ __forceinline__ explicit TileWriter(const TileMemory& memory)
      : consumer_(threadIdx.x / 128 - 1),
        boxes_(memory.boxes + consumer_ * kBoxesPerConsumer * kBoxBytes),
        row_(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

  // (column, row): position of the warpgroup's first element. Map: a CUtensorMap, or BlockMaps.
  // T: bf16 or f16.
  template <typename T = __nv_bfloat16, typename Map>
  __device__ __forceinline__ void put_narrow(const float (&z)[128], const Map* map, int column,
                                             int row) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      unsigned char* const box = begin_box(b);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * (8 * b + i) + 2 * h;
          if constexpr (std::is_same_v<T, __half>) {
            *reinterpret_cast<__half2*>(box + place(i, h, threadIdx.x % 4 * 4)) =
                __floats2half2_rn(z[at], z[at + 1]);
          } else {
            *reinterpret_cast<__nv_bfloat162*>(box + place(i, h, threadIdx.x % 4 * 4)) =
                __floats2bfloat162_rn(z[at], z[at + 1]);
          }
        }
      }
      end_box(map, box, column + 64 * b, row, false);
    }
  }
  __device__ __forceinline__ void put_f32(const float (&z)[128], const CUtensorMap* map, int column,
                                          int row, bool add) {
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      unsigned char* const box = begin_box(b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * (4 * b + i) + 2 * h;
          *reinterpret_cast<float2*>(box +
                                     place(2 * i + threadIdx.x % 4 / 2, h, threadIdx.x % 2 * 8)) =
              make_float2(z[at], z[at + 1]);
        }
      }
      end_box(map, box, column + 32 * b, row, add);
    }
  }
  // Like put_narrow with registers of two bf16 each: `words(b, w)`, w in [0, 16), packs
  // accumulators 32 b + 2 w and the next. in_order: stored in the layout of OrderedPosition instead
  // of the matrix's.
  template <typename Words>
  __device__ __forceinline__ void put_words(const Words& words, bool in_order,
                                            const CUtensorMap* map, int column, int row) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      unsigned char* const box = begin_box(b);
      if (in_order) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const OrderedPosition at(k);
          *reinterpret_cast<uint4*>(box + at.row * 128 + ((at.chunk ^ (at.row & 7)) << 4)) =
              make_uint4(words(b, 4 * k), words(b, 4 * k + 1), words(b, 4 * k + 2),
                         words(b, 4 * k + 3));
        }
      } else {
#pragma unroll
        for (int w = 0; w < 16; ++w)
          *reinterpret_cast<unsigned*>(box + place(w / 2, w % 2, threadIdx.x % 4 * 4)) =
              words(b, w);
      }
      end_box(map, box, column + 64 * b, row, false);
    }
  }
  // Stores 16 bytes of each thread for each g in [0, 8): threads in order, 2048 bytes for each g.
  template <typename Bytes>
  __device__ __forceinline__ void put_bytes(const Bytes& bytes, void* to) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      unsigned char* const box = begin_box(b);
#pragma unroll
      for (int g = 0; g < 4; ++g)
        *reinterpret_cast<uint4*>(box + g * 2048 + threadIdx.x % 128 * 16) = bytes(4 * b + g);
      async_proxy_fence();
      warpgroup_sync(consumer_ + 1);
      if (!leads()) continue;
      bulk_store(static_cast<unsigned char*>(to) + b * kBoxBytes, box, kBoxBytes);
      tma_commit();
    }
  }
  // Layout of a box of 64 rows x 128 bytes that only the same thread reads back: position of its
  // four 16-byte groups, so that eight threads cover a row.
  struct OrderedPosition {
    __device__ __forceinline__ explicit OrderedPosition(int k)
        : row(static_cast<int>(threadIdx.x / 32 % 4 * 16 + k * 4 + threadIdx.x % 32 / 8)),
          chunk(static_cast<int>(threadIdx.x % 8)) {}
    int row, chunk;
  };
  // Bytes of a warp's quarter of the boxes, which it may use until the next put.
  static constexpr int kWarpBytes = kBoxesPerConsumer * kBoxBytes / 4;
  __device__ __forceinline__ unsigned char* memory_of_warp() const {
    if (leads()) tma_wait_reads<0>();
    warpgroup_sync(consumer_ + 1);
    return boxes_ + threadIdx.x / 32 % 4 * kWarpBytes;
  }
  // Waits for the stores; call it before the CTA exits.
  __device__ __forceinline__ void drain() const {
    if (leads()) tma_wait_reads<0>();
  }

 private:
  __device__ __forceinline__ bool leads() const { return threadIdx.x % 128 == 0; }
  // Byte offset of 16-byte chunk `chunk` of the thread's row under the 128-byte swizzle.
  __device__ __forceinline__ int place(int chunk, int h, int byte) const {
    return (row_ + 8 * h) * 128 + ((chunk ^ (row_ & 7)) << 4) + byte;
  }
  __device__ __forceinline__ unsigned char* begin_box(int b) const {
    if (leads()) tma_wait_reads<kBoxesPerConsumer - 1>();
    warpgroup_sync(consumer_ + 1);
    return boxes_ + b % kBoxesPerConsumer * kBoxBytes;
  }
  template <typename Map>
  __device__ __forceinline__ void end_box(const Map* map, const unsigned char* box, int x, int y,
                                          bool add) const {
    async_proxy_fence();
    warpgroup_sync(consumer_ + 1);
    if (!leads()) return;
    if constexpr (std::is_same_v<Map, BlockMaps>) {
      map->at(x,
              [&](const CUtensorMap* of, int column) { tma_store(of, box, column, y, policy_); });
    } else if (add) {
      tma_add(map, box, x, y, policy_);
    } else {
      tma_store(map, box, x, y, policy_);
    }
    tma_commit();
  }

  int consumer_;
  unsigned char* boxes_;
  int row_;
  std::uint64_t policy_ = pass_policy();  // results are read long after, or not by this kernel
};

}  // namespace logitless::cuda

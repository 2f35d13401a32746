// Persistent forward kernel of the head for compute capability 8.0 and later. The mainloop computes
// the logits of a tile of 128 tokens x 256 vocabulary entries by mma.sync in registers, and
// logit_epilogue.cuh reduces them there.
//
// A CTA has eight warps of 64 x 64 results each, two along the tokens and four along the entries.
// All of them copy operands to shared memory, in a pipeline of steps along dim that runs on into
// the next tile during an epilogue. Barriers of each stage, in place of barriers of the CTA, let
// warps be a step apart.
#pragma once

#include <type_traits>

#include "kernels/cuda/device/warp_sums_sm80.cuh"
#include "kernels/cuda/head/logit_epilogue.cuh"

namespace logitless::cuda::sm80 {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
// Partial results of rows, of each of the four warps that share them: RowSum's, the greatest logit,
// its entry, the mass.
inline constexpr int kRowWarps = 4;
inline constexpr int kPartials = 6;
inline constexpr int kPartialBytes = kPartials * kRowWarps * kTileRows * 4;

// The pipeline: steps of kElements along dim, in kStages of shared memory.
template <int kElements, int kStages>
struct Pipeline {
  static constexpr int kStepElements = kElements;
  static constexpr int kStageCount = kStages;
  static constexpr int kParts = kElements / 16;  // products of 16 along dim in a step
  static constexpr int kRowBytes = kElements * 2;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kHiddenBytes = kTileRows * kRowBytes;  // of a stage
  static constexpr int kStageBytes = kHiddenBytes + kTileColumns * kRowBytes;
  // Two barriers for each stage: full and empty.
  static constexpr int kBarriers = kStages * kStageBytes + kPartialBytes;
  static constexpr int kSharedBytes = kBarriers + 16 * kStages;
  // The place of a 16-byte chunk in a row, so that eight rows at one column are in different banks.
  static __device__ __forceinline__ constexpr int place(int row, int chunk) {
    return chunk ^ (row / (8 / kRowChunks) % kRowChunks);
  }
};
// LongSteps needs 163 KiB of shared memory for a thread block (capabilities 8.0 and 9.0),
// ShortSteps 99 KiB (8.6, 8.9 and 12.0).
using LongSteps = Pipeline<64, 3>;
using ShortSteps = Pipeline<32, 3>;
// Steps after which a stage is written again: warps may be as far apart.
inline constexpr int kLag = 1;

struct Operands {
  const void* hidden;
  std::int64_t hidden_stride;
  const void* rows;
  std::int64_t row_stride;
  int tokens;
  int dim;
  LogitBlock block;
  VocabRanges ranges;
};

// Keeps an address in its register: the compiler would compute it again in each step.
__device__ __forceinline__ void fix(std::uint32_t& address) { asm volatile("" : "+r"(address)); }

// The tiles of a CTA in order: halves of the tiles of a launch.
class Tiles {
 public:
  __device__ __forceinline__ explicit Tiles(const ForwardArguments& a)
      : pairs_(pairs_of(a)),
        listed_(a.list == nullptr ? 0 : a.list_begin[0]),
        end_(2 *
             (a.list == nullptr ? pairs_ * a.vocab_tiles : a.list_begin[a.vocab_tiles] - listed_)),
        next_(static_cast<int>(blockIdx.x)) {}
  // Returns false at the end.
  __device__ __forceinline__ bool next(const ForwardArguments& a) {
    for (; next_ < end_; next_ += static_cast<int>(gridDim.x)) {
      tile = tile_of(next_ / 2 + listed_, a, pairs_);
      if (a.wanted != nullptr && a.wanted[tile.pair] == 0) continue;
      row = (2 * tile.pair + next_ % 2) * kTileRows;
      next_ += static_cast<int>(gridDim.x);
      return true;
    }
    return false;
  }
  Tile tile;
  int row;  // first token

 private:
  int pairs_, listed_, end_, next_;
};

// Copies operands to the stages over all tiles of the CTA, a step at a time in two halves.
// kAligned: addresses and strides are multiples of 16 bytes.
template <typename T, class P, bool kAligned>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Operands& o, const ForwardArguments& a,
                                    std::uint32_t stages)
      : tiles_(a), to_(stages + row() * P::kRowBytes + (P::place(row(), chunk()) << 4)) {
    fix(to_);
    begin_tile(o, a);
    wanted_ = left_ > 0 ? valid_ : 0;
  }
  // Enqueues a part of a step's copies, one of P::kParts.
  template <int kPart>
  __device__ __forceinline__ void load(const Operands& o, int stage) const {
    const std::uint32_t to = to_ + static_cast<std::uint32_t>(stage * P::kStageBytes);
#pragma unroll
    for (int i = kPart * kCopies / P::kParts; i < (kPart + 1) * kCopies / P::kParts; ++i) {
      if (i < kHiddenCopies) {
        put(to + i * kCopyBytes, hidden_ + i * kCopyRows * o.hidden_stride, i);
      } else {
        put(to + i * kCopyBytes, rows_ + (i - kHiddenCopies) * kCopyRows * o.row_stride, i);
      }
    }
  }
  // Ends a step's group of copies, empty after the last tile, and goes to the next step.
  __device__ __forceinline__ void advance(const Operands& o, const ForwardArguments& a) {
    hidden_ += P::kStepElements;
    rows_ += P::kStepElements;
    left_ -= P::kStepElements;
    if (left_ + chunk() * 8 <= 0) begin_tile(o, a);
    wanted_ = left_ > 0 ? valid_ : 0;
  }

 private:
  static constexpr int kCopyRows = kThreads / P::kRowChunks;  // rows that the CTA copies at once
  static constexpr int kCopyBytes = kCopyRows * P::kRowBytes;
  static constexpr int kHiddenCopies = kTileRows / kCopyRows;
  static constexpr int kRowCopies = kTileColumns / kCopyRows;
  static constexpr int kCopies = kHiddenCopies + kRowCopies;
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x / P::kRowChunks);
  }
  static __device__ __forceinline__ int chunk() {
    return static_cast<int>(threadIdx.x % P::kRowChunks);
  }

  __device__ __forceinline__ void begin_tile(const Operands& o, const ForwardArguments& a) {
    left_ = o.dim - chunk() * 8;
    valid_ = 0;
    if (!tiles_.next(a)) return;
    const int token = tiles_.row + row();
    const int entry = tiles_.tile.vocab_id * kTileColumns + row();
    hidden_ = static_cast<const T*>(o.hidden) + token * o.hidden_stride + chunk() * 8;
    rows_ = static_cast<const T*>(o.rows) + entry * o.row_stride + chunk() * 8;
#pragma unroll
    for (int i = 0; i < kHiddenCopies; ++i)
      valid_ |= token + i * kCopyRows < o.tokens ? 1u << i : 0u;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i)
      valid_ |= entry + i * kCopyRows < a.vocab ? 1u << (kHiddenCopies + i) : 0u;
  }
  // Copies eight elements; 0 for those beyond dim, and for rows that do not exist.
  __device__ __forceinline__ void put(std::uint32_t to, const T* from, int copy) const {
    const bool valid = (wanted_ >> copy & 1u) != 0;
    if constexpr (kAligned) {
      copy_async_if(valid, to, from, copy < kHiddenCopies ? keep_ : pass_);
    } else {
      const int left = valid ? left_ : 0;
      std::uint32_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto element = [&](int at) {
          return at < left ? reinterpret_cast<const std::uint16_t*>(from)[at] : std::uint16_t{0};
        };
        bits[i] = element(2 * i) | static_cast<std::uint32_t>(element(2 * i + 1)) << 16;
      }
      store_shared(to, bits);
    }
  }

  Tiles tiles_;
  std::uint32_t to_;
  int left_;  // elements of the row from the thread's chunk on
  const T* hidden_;
  const T* rows_;
  std::uint64_t keep_ = policy_keep();
  std::uint64_t pass_ = policy_pass();
  unsigned valid_;   // a bit for each copy of a step: its row exists
  unsigned wanted_;  // likewise; 0 beyond dim
};

// Shared addresses that a lane reads its fragments from.
template <class P>
class FragmentReader {
 public:
  __device__ __forceinline__ explicit FragmentReader(std::uint32_t stages) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int a_row = lane % 16;
    const int b_row = lane / 16 * 8 + lane % 8;
    a_ =
        stages + (warp / kRowWarps * 64 + a_row) * P::kRowBytes + (P::place(a_row, lane / 16) << 4);
    b_ = stages + P::kHiddenBytes + (warp % kRowWarps * 64 + b_row) * P::kRowBytes +
         (P::place(b_row, lane / 8 % 2) << 4);
    fix(a_);
    fix(b_);
  }
  // One of the P::kParts of a step.
  __device__ __forceinline__ void read(WarpOperands& f, int stage, int part) const {
    const auto at = static_cast<std::uint32_t>(stage * P::kStageBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_matrices<false>(f.a[i], ((a_ ^ (part * 32)) + at) + i * 16 * P::kRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_matrices<false>(f.b[i], ((b_ ^ (part * 32)) + at) + i * 16 * P::kRowBytes);
  }

 private:
  std::uint32_t a_, b_;
};

// f.operator()<kPart>() for each part of a step.
template <class P, int kPart = 0, typename F>
__device__ __forceinline__ void for_parts(const F& f) {
  if constexpr (kPart < P::kParts) {
    f.template operator()<kPart>();
    for_parts<P, kPart + 1>(f);
  }
}

// A thread's part of a tile. A warp has 64 rows and 64 columns. Four lanes share a row. So do four
// warps, which merge their parts in shared memory in a fixed order.
struct MmaPosition : TilePosition {
  __device__ __forceinline__ MmaPosition(const ForwardArguments& a, int tile_row, const Tile& tile,
                                         float* partials)
      : TilePosition(a, tile_row + local_row(0), tile,
                     static_cast<int>(threadIdx.x / 32 % kRowWarps * 64 + threadIdx.x % 4 * 2)),
        partials_(partials) {}
  static constexpr int kRows = 8;
  static constexpr int kColumns = 16;
  static constexpr int kHalves = 1;
  static constexpr int kSegments = 1;
  static __device__ __forceinline__ int segment(int) {
    return static_cast<int>(threadIdx.x / 32 % kRowWarps);
  }
  static __device__ __forceinline__ constexpr int reg(int h, int i) {
    return h / 2 * 32 + i / 2 * 4 + h % 2 * 2 + i % 2;
  }
  static __device__ __forceinline__ constexpr int column(int i) { return i / 2 * 8 + i % 2; }
  static __device__ __forceinline__ constexpr int half(int) { return 0; }
  static __device__ __forceinline__ constexpr int offset(int h) { return h / 2 * 16 + h % 2 * 8; }
  __device__ __forceinline__ std::int64_t token(int h) const { return row + offset(h); }
  __device__ __forceinline__ bool writes() const { return threadIdx.x % 128 / 4 < 8 && leads(); }

  // Sum of a row; every thread that shares the row calls it and gets it.
  __device__ __forceinline__ float row_total(float part, int h) const {
    put(0, quad_sum(part), h);
    sync_rows();
    const float* const of = partials_ + local_row(h);
    return (of[0] + of[kTileRows]) + (of[2 * kTileRows] + of[3 * kTileRows]);
  }
  __device__ __forceinline__ void readers_done() const { sync_rows(); }
  __device__ __forceinline__ void put_sum(RowSum kind, float*, float part, int h) const {
    put(static_cast<int>(kind), quad_sum(part), h);
  }
  __device__ __forceinline__ void put_greatest(const ForwardArguments&, float top, int h) const {
    put(kGreatest, top, h);
  }
  __device__ __forceinline__ void put_best(const ForwardArguments&, float top, int index,
                                           int h) const {
    put(kGreatest, top, h);
    put(kIndex, __int_as_float(index), h);
  }
  __device__ __forceinline__ void put_masses(const ForwardArguments&, const float (&mass)[1],
                                             int h) const {
    put(kMass, quad_sum(mass[0]), h);
  }
  // Merges and writes the partial results of the tile's rows.
  template <ForwardMode kMode>
  __device__ __forceinline__ void flush(const ForwardArguments& a) const {
    if constexpr (kMode == ForwardMode::kGradient || kMode == ForwardMode::kPlainGradient) return;
    sync_rows();
    merge<kMode>(a);
    sync_rows();  // the next tile writes the parts again
  }

 private:
  static constexpr int kGreatest = 3, kIndex = 4, kMass = 5;
  template <ForwardMode kMode>
  __device__ __forceinline__ void merge(const ForwardArguments& a) const {
    const int local = static_cast<int>(threadIdx.x % 128);
    if (local >= 64) return;
    const int r = static_cast<int>(threadIdx.x / 128) * 64 + local;
    const std::int64_t to = out - local_row(0) + r;
    const auto part = [&](int kind, int warp) {
      return partials_[(kind * kRowWarps + warp) * kTileRows + r];
    };
    const auto sum = [&](RowSum kind) {
      const int k = static_cast<int>(kind);
      return (part(k, 0) + part(k, 1)) + (part(k, 2) + part(k, 3));
    };
    if constexpr (kMode != ForwardMode::kReference && kMode != ForwardMode::kLogits) {
      a.sums[to] = sum(RowSum::kSum);
      if (a.masses != nullptr) {
        const std::int64_t at = 2 * (out - row) + row - local_row(0) + r;
        a.masses[at] = part(kMass, 0) + part(kMass, 1);
        a.masses[at + a.padded_tokens] = part(kMass, 2) + part(kMass, 3);
      }
    }
    if constexpr (kMode == ForwardMode::kPlainEntropy || kMode == ForwardMode::kGeneral) {
      if (a.entropy != nullptr) a.entropy[to] = sum(RowSum::kEntropy);
    }
    if constexpr (kMode == ForwardMode::kGeneral) {
      if (a.weighted != nullptr) a.weighted[to] = sum(RowSum::kWeighted);
    }
    if constexpr (kMode == ForwardMode::kReference || kMode == ForwardMode::kLogits ||
                  kMode == ForwardMode::kGeneral) {
      if (a.best == nullptr) return;
      float top = part(kGreatest, 0);
      int index = __float_as_int(part(kIndex, 0));
#pragma unroll
      for (int w = 1; w < kRowWarps; ++w) {
        const float other = part(kGreatest, w);
        const int its_index = __float_as_int(part(kIndex, w));
        if (other > top || (other == top && its_index < index)) {
          top = other;
          index = its_index;
        }
      }
      a.best[to] = top;
      if constexpr (kMode == ForwardMode::kGeneral) a.best_index[to] = index;
    }
  }

  static __device__ __forceinline__ int local_row(int h) {
    return static_cast<int>(threadIdx.x / 128 * 64 + threadIdx.x % 32 / 4) + offset(h);
  }
  static __device__ __forceinline__ bool leads() { return threadIdx.x % 4 == 0; }
  __device__ __forceinline__ void put(int kind, float value, int h) const {
    if (leads())
      partials_[(kind * kRowWarps + threadIdx.x / 32 % kRowWarps) * kTileRows + local_row(h)] =
          value;
  }
  // The four warps that share rows.
  static __device__ __forceinline__ void sync_rows() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
  }

  float* partials_;
};

// The memory that a tile of 256 entries is stored in.
template <typename T>
struct StoredTile {
  __device__ __forceinline__ StoredTile(const Operands& o, int vocab_id) {
    int entry = vocab_id * kTileColumns;
    if (o.ranges.count == 0) {
      data = static_cast<T*>(o.block.data) + entry;
      stride = o.block.stride;
      return;
    }
    int range = 0;
    while (range + 1 < o.ranges.count && entry >= o.ranges.first[range + 1]) ++range;
    data = static_cast<T*>(o.ranges.data[range]) + entry - o.ranges.first[range];
    stride = o.ranges.stride(range);
  }
  T* data;
  std::int64_t stride;
};

// Stores eight elements, two in each of the registers.
template <typename T>
__device__ __forceinline__ void store_elements(T* to, const std::uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    reinterpret_cast<std::uint16_t*>(to)[i] =
        static_cast<std::uint16_t>(pairs[i / 2] >> (i % 2 * 16));
}

// Stores a warp's 64 x 64 results in 16 bits. Four lanes exchange theirs, so that each has
// eight adjacent columns.
template <typename T>
__device__ __forceinline__ void store_tile(const float (&z)[128], const Operands& o, int tile_row,
                                           int vocab_id) {
  const StoredTile<T> to(o, vocab_id);
  const std::uint64_t policy = policy_pass();
  const bool aligned = reinterpret_cast<std::uintptr_t>(to.data) % 16 == 0;
  const int lane = static_cast<int>(threadIdx.x % 4);
  const int row = tile_row + static_cast<int>(threadIdx.x / 128 * 64 + threadIdx.x % 32 / 4);
  T* const first = to.data + row * to.stride + threadIdx.x / 32 % kRowWarps * 64 + lane * 8;
#pragma unroll
  for (int h = 0; h < MmaPosition::kRows; ++h) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 32 columns each
      std::uint32_t w[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = (part * 4 + n) * 2;
        w[n] = pair_of<T>(z[MmaPosition::reg(h, i)], z[MmaPosition::reg(h, i + 1)]);
      }
      transpose_pairs(w);
      if (row + MmaPosition::offset(h) >= o.tokens) continue;
      T* const at = first + MmaPosition::offset(h) * to.stride + part * 32;
      if (aligned) {
        store_16_bytes(at, w, policy);
      } else {
        store_elements(at, w);
      }
    }
  }
}

template <typename T, class P, ForwardMode kMode, bool kStore, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    logit_tiles(const __grid_constant__ Operands o, const __grid_constant__ ForwardArguments a) {
  if (a.wanted != nullptr && a.wanted[a.token_pairs] == 0) return;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr int kStages = P::kStageCount;
  const auto stages = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory));
  auto* const partials = reinterpret_cast<float*>(shared_memory + kStages * P::kStageBytes);
  const auto full = [&](int stage) { return CopyBarrier(stages + P::kBarriers + stage * 16); };
  const auto empty = [&](int stage) { return CopyBarrier(stages + P::kBarriers + stage * 16 + 8); };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      full(s).init(kThreads);
      empty(s).init(kWarps);
    }
  }
  __syncthreads();
  Tiles tiles(a);
  Loader<T, P, kAligned> loader(o, a, stages);
  const FragmentReader<P> reader(stages);
  const auto loaded = [&](int stage) {
    full(stage).template arrive_after_copies<kAligned>();
    loader.advance(o, a);
  };
  for (int s = 0; s + kLag < kStages; ++s) {
    for_parts<P>([&]<int kPart>() { loader.template load<kPart>(o, s); });
    loaded(s);
  }
  WarpOperands fragments[2];
  full(0).wait(0);
  reader.read(fragments[0], 0, 0);
  int stage = 0, to = kStages - kLag;
  unsigned phase = 0;     // of the stage that is read
  unsigned to_phase = 1;  // of the stage that is written, as it is emptied: at first it is empty
  while (tiles.next(a)) {
    float z[128];
#pragma unroll
    for (float& value : z) value = 0.0f;
    for (int k = 0; k < a.steps; ++k) {
      const bool wraps = stage + 1 == kStages;
      const int next = wraps ? 0 : stage + 1;
      const unsigned next_phase = wraps ? phase ^ 1 : phase;
      for_parts<P>([&]<int kPart>() {
        if constexpr (kPart + 1 < P::kParts) {
          reader.read(fragments[(kPart + 1) % 2], stage, kPart + 1);
        } else {
          if (threadIdx.x % 32 == 0) empty(stage).arrive();
          full(next).wait(next_phase);
          reader.read(fragments[0], next, 0);
        }
        if constexpr (kPart == 0) empty(to).wait(to_phase);
        loader.template load<kPart>(o, to);
        multiply<T>(z, fragments[kPart % 2]);
      });
      loaded(to);
      if (++to == kStages) {
        to = 0;
        to_phase ^= 1;
      }
      stage = next;
      phase = next_phase;
    }
    const MmaPosition at(a, tiles.row, tiles.tile, partials);
    finish_tile<kMode, kStore>(z, a, at);
    at.template flush<kMode>(a);
    if constexpr (kStore) {
      if (tiles.tile.vocab_id < a.stored_tiles) {
        if (std::is_same_v<T, __half> && a.shifts != nullptr) shift_rows(z, a, at);
        store_tile<T>(z, o, tiles.row, tiles.tile.vocab_id);
      }
    }
  }
  copies_wait();
}

}  // namespace logitless::cuda::sm80

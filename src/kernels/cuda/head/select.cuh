// Selection of a row's greatest entries by a thread block, without sorting the row: the least entry
// of the smallest set of the greatest ones whose weights reach a target.
//
// Passes over the row add weights into bins, and the bin where the sum reaches the target is the
// row's part for the next pass. Parts of few entries are sorted in shared memory. Weights are
// integers, so sums do not depend on their order.
#pragma once

#include "kernels/cuda/head/draw.cuh"

namespace logitless::cuda {

using Weight = unsigned long long;

inline constexpr int kSelectThreads = 512;
inline constexpr int kSelectWarps = kSelectThreads / 32;
inline constexpr int kSelectBins = 1024;  // two of a thread
inline constexpr int kMostListed = 2048;  // entries that are sorted, four of a thread

// The entries of a part that are looked for, in bins of equal width below `top`. An inverse width
// of 0: one bin.
struct LinearBins {
  float top = 0.0f, inverse = 0.0f;

  // 0 for NaN, which is above all others.
  __device__ __forceinline__ int of(ScoredEntry entry) const {
    constexpr int kLast = kSelectBins - 1;
    const float at = (top - score_of(entry)) * inverse;
    return at >= static_cast<float>(kLast) ? kLast : max(0, static_cast<int>(at));
  }
};

// Entries from `least` to `greatest`, of one linear bin.
struct RowPart {
  ScoredEntry least = 0, greatest = ~ScoredEntry{0};
  LinearBins bins;
  int bin = 0;

  __device__ __forceinline__ bool has(ScoredEntry entry) const {
    return entry >= least && entry <= greatest && (bins.inverse == 0.0f || bins.of(entry) == bin);
  }
};

// Shared memory of a thread block. Its functions are called by all threads.
struct Selection {
  std::uint32_t low[kSelectBins], high[kSelectBins];  // halves of the bins' weights
  ScoredEntry list[kMostListed];
  ScoredEntry least, greatest;
  Weight warp_weights[kSelectWarps];
  Weight above;  // weight of the entries above the part
  int listed, found;

  // Returns the sum of the weights of the threads before this one; `total` becomes that of all.
  __device__ Weight sum_before(Weight mine, Weight& total) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    Weight sum = mine;
    for (int step = 1; step < 32; step *= 2) {
      const Weight other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    __syncthreads();  // the sums of the call before are read
    if (lane == 31) warp_weights[threadIdx.x / 32] = sum;
    __syncthreads();
    sum -= mine;
    total = 0;
    for (int w = 0; w < kSelectWarps; ++w) {
      if (w == static_cast<int>(threadIdx.x / 32)) sum += total;
      total += warp_weights[w];
    }
    return sum;
  }

  // Adds the weights of a part to the bins bin_of(entry).
  template <class Entries, class Weights, typename BinOf>
  __device__ void fill_bins(const Entries& entries, const Weights& weights, const RowPart& part,
                            const BinOf& bin_of) {
    for (int i = static_cast<int>(threadIdx.x); i < kSelectBins; i += kSelectThreads)
      low[i] = high[i] = 0;
    __syncthreads();
    entries.for_each([&](ScoredEntry entry) {
      if (!part.has(entry)) return;
      const Weight weight = weights.of(entry);
      if (weight == 0) return;
      const int bin = bin_of(entry);
      const auto low_half = static_cast<std::uint32_t>(weight);
      const std::uint32_t before = atomicAdd(&low[bin], low_half);
      const auto more =
          static_cast<std::uint32_t>(weight >> 32) + (before + low_half < before ? 1 : 0);
      if (more != 0) atomicAdd(&high[bin], more);
    });
    __syncthreads();
  }

  // Sets `found` to the first of `count` weights, `each` of a thread, with which the sum reaches
  // the target; the last one if none does. `above` becomes the sum before it.
  template <int kEach, class Weights>
  __device__ void find(const Weight (&mine)[kEach], int count, const Weights& weights,
                       Weight& target, bool& targets) {
    Weight sum = 0, total = 0;
#pragma unroll
    for (const Weight w : mine) sum += w;
    sum = sum_before(sum, total);
    if (!targets) target = weights.target(total);
    targets = true;
    sum += above;
    if (threadIdx.x == 0) found = count - 1;
    __syncthreads();  // all have read `above`
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (sum < target && sum + mine[i] >= target) {
        found = static_cast<int>(threadIdx.x) * kEach + i;
        above = sum;
      }
      sum += mine[i];
    }
    __syncthreads();
  }
  template <class Weights>
  __device__ void find_bin(const Weights& weights, Weight& target, bool& targets) {
    Weight mine[kSelectBins / kSelectThreads];
#pragma unroll
    for (int i = 0; i < kSelectBins / kSelectThreads; ++i) {
      const int bin = static_cast<int>(threadIdx.x) * (kSelectBins / kSelectThreads) + i;
      mine[i] = static_cast<Weight>(high[bin]) << 32 | low[bin];
    }
    find(mine, kSelectBins, weights, target, targets);
  }

  // Lists a part's entries in any order. Returns false if they are too many; the part is then
  // bounded by its least and its greatest entry.
  template <class Entries>
  __device__ bool list_part(const Entries& entries, RowPart& part) {
    if (threadIdx.x == 0) {
      listed = 0;
      least = ~ScoredEntry{0};
      greatest = 0;
    }
    __syncthreads();
    ScoredEntry low_end = ~ScoredEntry{0}, high_end = 0;
    entries.for_each([&](ScoredEntry entry) {
      if (!part.has(entry)) return;
      low_end = min(low_end, entry);
      high_end = max(high_end, entry);
      if (*static_cast<volatile int*>(&listed) > kMostListed) return;
      const int at = atomicAdd(&listed, 1);
      if (at < kMostListed) list[at] = entry;
    });
    for (int step = 16; step > 0; step /= 2) {
      low_end = min(low_end, __shfl_xor_sync(~0u, low_end, step));
      high_end = max(high_end, __shfl_xor_sync(~0u, high_end, step));
    }
    if (threadIdx.x % 32 == 0) {
      atomicMin(&least, low_end);
      atomicMax(&greatest, high_end);
    }
    __syncthreads();
    if (listed <= kMostListed) return true;
    part = {least, greatest, {}, 0};
    return false;
  }

  // Sorts the list, the greatest first: bitonic (Batcher 1968).
  __device__ void sort_list() {
    int size = 2;
    while (size < listed) size *= 2;
    for (int i = listed + static_cast<int>(threadIdx.x); i < size; i += kSelectThreads) list[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
      for (int step = run / 2; step > 0; step /= 2) {
        for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kSelectThreads) {
          const int a = i / step * 2 * step + i % step, b = a + step;
          const bool falls = (a & run) == 0;
          const ScoredEntry x = list[a], y = list[b];
          if ((x < y) == falls) {
            list[a] = y;
            list[b] = x;
          }
        }
        __syncthreads();
      }
    }
  }

  // Returns the entry that is looked for among the listed ones.
  template <class Weights>
  __device__ ScoredEntry pick(const Weights& weights, Weight& target, bool& targets) {
    sort_list();
    constexpr int kEach = kMostListed / kSelectThreads;
    Weight mine[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = static_cast<int>(threadIdx.x) * kEach + i;
      mine[i] = at < listed ? weights.of(list[at]) : 0;
    }
    find(mine, listed, weights, target, targets);
    const ScoredEntry entry = listed > 0 ? list[found] : 0;
    __syncthreads();  // before the next use of the list
    return entry;
  }

  // Returns the least entry of the smallest set of the greatest entries whose weights sum to at
  // least weights.target(sum of all weights). entries.for_each(f) calls f(entry) for each entry
  // once. `bins` split the row first; without a width, its entries are listed first.
  template <class Entries, class Weights>
  __device__ ScoredEntry select(const Entries& entries, const Weights& weights,
                                const LinearBins& bins) {
    RowPart part;
    Weight target = 0;
    bool targets = false;  // the target is known
    if (threadIdx.x == 0) above = 0;
    if (bins.inverse > 0.0f) {
      fill_bins(entries, weights, part, [&](ScoredEntry entry) { return bins.of(entry); });
      find_bin(weights, target, targets);
      part.bins = bins;
      part.bin = found;
    }
    while (!list_part(entries, part)) {
      const int bits = 64 - __clzll(static_cast<long long>(part.greatest - part.least));
      const int shift = max(0, bits - 10);  // 2^10 bins
      const ScoredEntry top = part.greatest;
      fill_bins(entries, weights, part,
                [&](ScoredEntry entry) { return static_cast<int>((top - entry) >> shift); });
      find_bin(weights, target, targets);
      part.greatest = top - (static_cast<ScoredEntry>(found) << shift);
      if (shift == 0) return part.greatest;
      const ScoredEntry width = (ScoredEntry{1} << shift) - 1;
      part.least = part.greatest - min(width, part.greatest - part.least);
    }
    return pick(weights, target, targets);
  }
};

}  // namespace logitless::cuda

// scatter_add in a fixed order: indices are sorted, and runs of equal ones summed.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/tensor/element.cuh"
#include "kernels/cuda/tensor/scatter_positions.h"
#include "kernels/device/index.h"

namespace logitless::cuda {
namespace {

// --- Stable radix sort of keys below 2^bits, least significant digit first.

constexpr int kWarps = kSortThreads / 32;

// Indices out of range become `rows`, after all others.
__global__ void __launch_bounds__(kSortThreads)
    number_keys(const ScatterCall c, std::uint32_t* keys, std::int32_t* positions) {
  const std::int64_t step = std::int64_t{gridDim.x} * kSortThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kSortThreads + threadIdx.x; i < c.count;
       i += step) {
    const std::int64_t row = index_at(c.index, c.index_dtype, i);
    keys[i] = static_cast<std::uint32_t>(row >= 0 && row < c.rows ? row : c.rows);
    positions[i] = static_cast<std::int32_t>(i);
  }
}

// counts[digit][tile]: keys of the tile with this digit.
__global__ void __launch_bounds__(kSortThreads)
    count_digits(const std::uint32_t* keys, std::int64_t count, int shift, std::uint32_t* counts) {
  __shared__ std::uint32_t found[kDigits];
  found[threadIdx.x] = 0;
  __syncthreads();
  for (int r = 0; r < kRounds; ++r) {
    const std::int64_t i = std::int64_t{blockIdx.x} * kSortTile + r * kSortThreads + threadIdx.x;
    if (i < count) atomicAdd(&found[keys[i] >> shift & (kDigits - 1)], 1u);
  }
  __syncthreads();
  counts[std::int64_t{threadIdx.x} * gridDim.x + blockIdx.x] = found[threadIdx.x];
}

// Exclusive prefix sum in place. One block.
__global__ void __launch_bounds__(1024) sum_before(std::uint32_t* counts, std::int64_t count) {
  __shared__ std::uint32_t sums[1024];
  std::uint32_t before = 0;
  for (std::int64_t first = 0; first < count; first += 1024) {
    const std::int64_t i = first + threadIdx.x;
    const std::uint32_t own = i < count ? counts[i] : 0;
    sums[threadIdx.x] = own;
    __syncthreads();
    for (unsigned step = 1; step < 1024; step *= 2) {
      const std::uint32_t left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
      __syncthreads();
      sums[threadIdx.x] += left;
      __syncthreads();
    }
    if (i < count) counts[i] = before + sums[threadIdx.x] - own;
    before += sums[1023];
    __syncthreads();
  }
}

// Scatters each key to its position: keys of earlier tiles with the same digit come first.
__global__ void __launch_bounds__(kSortThreads)
    place_keys(const std::uint32_t* keys, const std::int32_t* positions, std::int64_t count,
               int shift, const std::uint32_t* starts, std::uint32_t* keys_to,
               std::int32_t* positions_to) {
  __shared__ std::uint32_t next[kDigits];  // position of the next key of a digit
  __shared__ std::uint32_t of_warp[kWarps][kDigits];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  next[threadIdx.x] = starts[std::int64_t{threadIdx.x} * gridDim.x + blockIdx.x];
  for (int r = 0; r < kRounds; ++r) {
    for (int w = 0; w < kWarps; ++w) of_warp[w][threadIdx.x] = 0;
    __syncthreads();
    const std::int64_t i = std::int64_t{blockIdx.x} * kSortTile + r * kSortThreads + threadIdx.x;
    const bool valid = i < count;
    const std::uint32_t key = valid ? keys[i] : 0;
    const std::uint32_t digit = valid ? key >> shift & (kDigits - 1) : kDigits;
    const unsigned equal = __match_any_sync(0xffffffffu, digit);
    const int rank = __popc(equal & ((1u << lane) - 1));
    if (valid && rank == 0) of_warp[warp][digit] = static_cast<std::uint32_t>(__popc(equal));
    __syncthreads();
    // Positions of the warps' first keys of digit threadIdx.x.
    std::uint32_t place = next[threadIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const std::uint32_t own = of_warp[w][threadIdx.x];
      of_warp[w][threadIdx.x] = place;
      place += own;
    }
    next[threadIdx.x] = place;
    __syncthreads();
    if (valid) {
      const std::uint32_t to = of_warp[warp][digit] + static_cast<std::uint32_t>(rank);
      keys_to[to] = key;
      positions_to[to] = positions[i];
    }
    __syncthreads();
  }
}

// --- Sums of runs of equal keys.

constexpr int kSumThreads = 128;

// Out: unsigned for integers, which wrap. Tile t sums the sorted updates [128 t, 128 t + 128). A
// run inside the tile is added to its row. The part of a run that continues in the next tile goes
// to tails[t], of one that began in an earlier tile to heads[t].
template <typename Out>
__global__ void __launch_bounds__(kSumThreads)
    sum_runs(const ScatterCall c, const std::uint32_t* keys, const std::int32_t* positions,
             Out* heads, Out* tails) {
  const std::int64_t column = std::int64_t{blockIdx.y} * kSumThreads + threadIdx.x;
  if (column >= c.width) return;
  auto* const out = static_cast<Out*>(c.out);
  const std::int64_t first = std::int64_t{blockIdx.x} * kRun;
  const std::int64_t end = first + kRun < c.count ? first + kRun : c.count;
  const auto missing = static_cast<std::uint32_t>(c.rows);
  for (std::int64_t i = first; i < end;) {
    const std::uint32_t key = keys[i];
    if (key == missing) return;
    const bool from_before = i == first && i > 0 && keys[i - 1] == key;
    Out sum{0};
    do {
      sum += load<Out>(c.updates, c.dtype, positions[i] * c.width + column);
      ++i;
    } while (i < end && keys[i] == key);
    const bool goes_on = i == end && i < c.count && keys[i] == key;
    const std::int64_t part = blockIdx.x * c.width + column;
    if (from_before) {
      heads[part] = sum;
    } else if (goes_on) {
      tails[part] = sum;
    } else {
      out[key * c.width + column] += sum;
    }
  }
}

// Joins the runs that span tiles: tails[t], then the following heads, in order.
template <typename Out>
__global__ void __launch_bounds__(kSumThreads)
    join_runs(const ScatterCall c, const std::uint32_t* keys, const Out* heads, const Out* tails) {
  const std::int64_t column = std::int64_t{blockIdx.y} * kSumThreads + threadIdx.x;
  if (column >= c.width) return;
  const std::int64_t first = std::int64_t{blockIdx.x} * kRun, end = first + kRun;
  if (end >= c.count) return;
  const std::uint32_t key = keys[end - 1];
  if (key == static_cast<std::uint32_t>(c.rows) || keys[end] != key) return;
  // it began in an earlier tile
  if (first > 0 && keys[first - 1] == key && keys[first] == key) return;
  Out sum = tails[blockIdx.x * c.width + column];
  for (std::int64_t tile = blockIdx.x + 1; tile * kRun < c.count && keys[tile * kRun] == key;
       ++tile)
    sum += heads[tile * c.width + column];
  static_cast<Out*>(c.out)[key * c.width + column] += sum;
}

template <typename Out>
void sum_sorted(const ScatterCall& c, const std::uint32_t* keys, const std::int32_t* positions,
                const ScatterPositions& p) {
  auto* const base = static_cast<std::byte*>(c.workspace);
  auto* const heads = reinterpret_cast<Out*>(base + p.heads);
  auto* const tails = reinterpret_cast<Out*>(base + p.tails);
  const dim3 grid(static_cast<unsigned>(tiles_of(c.count, kRun)),
                  static_cast<unsigned>(tiles_of(c.width, kSumThreads)));
  const auto stream = static_cast<cudaStream_t>(c.stream);
  sum_runs<Out><<<grid, kSumThreads, 0, stream>>>(c, keys, positions, heads, tails);
  join_runs<Out><<<grid, kSumThreads, 0, stream>>>(c, keys, heads, tails);
  require_cuda(cudaGetLastError(), "scatter_add");
}

}  // namespace

void scatter_add_rows(const ScatterCall& c) {
  if (c.count == 0 || c.width == 0 || c.rows == 0) return;
  if (c.rows >= std::int64_t{1} << 31 || c.count >= std::int64_t{1} << 31)
    throw Unsupported(concat("scatter_add: ", c.count, " indices of ", c.rows,
                             " rows, expected fewer than 2^31"));
  const ScatterPositions p = positions_of(c);
  auto* const base = static_cast<std::byte*>(c.workspace);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const auto keys = [&](int i) { return reinterpret_cast<std::uint32_t*>(base + p.keys[i]); };
  const auto positions = [&](int i) {
    return reinterpret_cast<std::int32_t*>(base + p.positions[i]);
  };
  auto* const counts = reinterpret_cast<std::uint32_t*>(base + p.counts);
  const auto tiles = static_cast<unsigned>(tiles_of(c.count, kSortTile));
  number_keys<<<tiles, kSortThreads, 0, stream>>>(c, keys(0), positions(0));
  int now = 0;
  for (int shift = 0; shift < 32 && c.rows >> shift > 0; shift += kDigitBits) {
    count_digits<<<tiles, kSortThreads, 0, stream>>>(keys(now), c.count, shift, counts);
    sum_before<<<1, 1024, 0, stream>>>(counts, std::int64_t{kDigits} * tiles);
    place_keys<<<tiles, kSortThreads, 0, stream>>>(keys(now), positions(now), c.count, shift,
                                                   counts, keys(1 - now), positions(1 - now));
    now = 1 - now;
  }
  require_cuda(cudaGetLastError(), "sorting indices");
  switch (c.out_dtype) {
    case DType::f32:
      return sum_sorted<float>(c, keys(now), positions(now), p);
    case DType::f64:
      return sum_sorted<double>(c, keys(now), positions(now), p);
    case DType::i32:
      return sum_sorted<std::uint32_t>(c, keys(now), positions(now), p);
    default:
      return sum_sorted<std::uint64_t>(c, keys(now), positions(now), p);
  }
}

}  // namespace logitless::cuda

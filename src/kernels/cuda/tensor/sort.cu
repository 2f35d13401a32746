// Sorting and running sums of rows.
#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/tensor/element.cuh"
#include "kernels/cuda/tensor/radix_sort.h"
#include "kernels/cuda/tensor/strided.cuh"
#include "kernels/device/sort.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostCandidates = 2048;  // of a row in shared memory

// --- sort

// Returns unsigned numbers in the order of the elements. Both zeros are equal, and all NaNs.
__device__ std::uint32_t key_of(float v) {
  if (isnan(v)) return ~std::uint32_t{0};
  const std::uint32_t bits = __float_as_uint(v == 0.0f ? 0.0f : v);
  return bits >> 31 ? ~bits : bits | std::uint32_t{1} << 31;
}
__device__ std::uint64_t key_of(double v) {
  if (isnan(v)) return ~std::uint64_t{0};
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(v == 0.0 ? 0.0 : v));
  return bits >> 63 ? ~bits : bits | std::uint64_t{1} << 63;
}
__device__ std::uint32_t key_of(std::int32_t v) {
  return static_cast<std::uint32_t>(v) ^ std::uint32_t{1} << 31;
}
__device__ std::uint64_t key_of(std::int64_t v) {
  return static_cast<std::uint64_t>(v) ^ std::uint64_t{1} << 63;
}

// An element of a row. No two are equal, so that a set of them has one order.
template <typename Key>
struct Candidate {
  Key key = ~Key{0};
  std::uint32_t at = ~std::uint32_t{0};  // along the axis
  __device__ bool operator<(const Candidate& other) const {
    return key != other.key ? key < other.key : at < other.at;
  }
};

// Sorts `count` candidates, padded with the last in order, by a bitonic network.
template <typename Key>
__device__ void sort_candidates(Candidate<Key>* list, int count) {
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count + static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x))
    list[i] = {};
  for (int merged = 2; merged <= size; merged *= 2) {
    for (int apart = merged / 2; apart > 0; apart /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += static_cast<int>(blockDim.x)) {
        const int low = i / apart * 2 * apart + i % apart, high = low + apart;
        const Candidate<Key> a = list[low], b = list[high];
        if ((b < a) == ((low & merged) == 0)) {
          list[low] = b;
          list[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// A block for each row. It finds the next `segment` elements in order by one pass over the row, and
// passes again until all are written. Only elements before the last of those found so far are
// candidates; they are sorted when `capacity` of them are there.
template <typename Number, typename Key>
__global__ void __launch_bounds__(kThreads)
    sort_kernel(const SortRowsCall c, std::int64_t rows, int capacity, int segment) {
  extern __shared__ unsigned char memory[];
  __shared__ int count;
  auto* const list = reinterpret_cast<Candidate<Key>*>(memory);
  const auto threads = static_cast<std::int64_t>(blockDim.x);
  const std::int64_t step = c.x_strides.of[c.axis],
                     bytes = c.dtype == DType::f64 || c.dtype == DType::i64   ? 8
                             : c.dtype == DType::f32 || c.dtype == DType::i32 ? 4
                                                                              : 2;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t first = offset_of(c.rows, c.x_strides, row);
    const std::int64_t to_value = offset_of(c.rows, c.value_strides, row),
                       to_index = offset_of(c.rows, c.index_strides, row);
    Candidate<Key> written;  // the last one; none at first
    for (std::int64_t done = 0; done < c.kept;) {
      const int wanted = static_cast<int>(min(static_cast<std::int64_t>(segment), c.kept - done));
      Candidate<Key> bound;  // candidates are before it
      __syncthreads();
      if (threadIdx.x == 0) count = 0;
      __syncthreads();
      int there = 0;
      for (std::int64_t begin = 0; begin < c.size; begin += threads) {
        const int most = static_cast<int>(min(threads, c.size - begin));
        if (there + most > capacity) {  // the same for all threads
          sort_candidates(list, there);
          if (there >= wanted) bound = list[wanted - 1];
          there = min(there, wanted);
          __syncthreads();
          if (threadIdx.x == 0) count = there;
          __syncthreads();
        }
        const std::int64_t k = begin + threadIdx.x;
        if (k < c.size) {
          Key key = key_of(load<Number>(c.x, c.dtype, first + k * step));
          if (c.descending) key = ~key;
          const Candidate<Key> mine{key, static_cast<std::uint32_t>(k)};
          if (mine < bound && (done == 0 || written < mine)) list[atomicAdd(&count, 1)] = mine;
        }
        __syncthreads();
        there = count;
        __syncthreads();
      }
      sort_candidates(list, there);
      for (int i = static_cast<int>(threadIdx.x); i < wanted; i += static_cast<int>(threads)) {
        const std::int64_t from = first + list[i].at * step,
                           value = to_value + (done + i) * c.value_strides.of[c.axis];
        c.index[to_index + (done + i) * c.index_strides.of[c.axis]] = list[i].at;
        if (bytes == 8) {
          static_cast<std::uint64_t*>(c.values)[value] =
              static_cast<const std::uint64_t*>(c.x)[from];
        } else if (bytes == 4) {
          static_cast<std::uint32_t*>(c.values)[value] =
              static_cast<const std::uint32_t*>(c.x)[from];
        } else {
          static_cast<std::uint16_t*>(c.values)[value] =
              static_cast<const std::uint16_t*>(c.x)[from];
        }
      }
      written = list[wanted - 1];
      done += wanted;
    }
  }
}

template <typename Number, typename Key>
void sort_as(const SortRowsCall& c, std::int64_t rows) {
  // Short rows take a warp. A list of twice the wanted elements is sorted seldom.
  const int threads = c.size <= 64 ? 32 : kThreads;
  const std::int64_t wanted = std::min<std::int64_t>(c.kept, kMostCandidates / 2);
  const auto capacity = static_cast<int>(std::min<std::int64_t>(
      std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(2 * wanted, 4 * threads))),
      kMostCandidates));
  const auto shared = static_cast<std::size_t>(capacity) * sizeof(Candidate<Key>);
  sort_kernel<Number, Key><<<blocks_of(rows, 1), threads, shared, stream_of(c.stream)>>>(
      c, rows, capacity, static_cast<int>(wanted));
}

// --- running sums

// The sum of a part of a row, or its log-sum-exp.
template <typename Sum>
struct Running {
  bool logs;
  __device__ Sum nothing() const {
    if constexpr (std::is_same_v<Sum, double>) return logs ? -INFINITY : 0.0;
    return 0;
  }
  // Adds b, which comes after a.
  __device__ Sum add(Sum a, Sum b) const {
    if constexpr (std::is_same_v<Sum, double>) {
      if (logs) {
        const double top = isnan(a) || a > b ? a : b;
        return isinf(top) ? top : top + log(exp(a - top) + exp(b - top));
      }
    }
    return a + b;
  }
};

// Elements of 64 bits of integers wrap in unsigned sums.
template <typename Sum>
__device__ __forceinline__ Sum number_at(const ScanRowsCall& c, DType dtype, std::int64_t at) {
  if constexpr (std::is_same_v<Sum, double>) return load<double>(c.x, dtype, at);
  return static_cast<Sum>(load<std::int64_t>(c.x, dtype, at));
}
template <typename Sum>
__device__ __forceinline__ void write_sum(const ScanRowsCall& c, DType dtype, std::int64_t at,
                                          Sum sum) {
  if constexpr (std::is_same_v<Sum, double>) {
    store(c.out, dtype, at, sum);
  } else {
    store(c.out, dtype, at, static_cast<std::int64_t>(sum));
  }
}

// Returns the combination of the warp's sums up to this lane's.
template <typename Sum>
__device__ Sum sum_up_to(const Running<Sum>& running, Sum sum) {
  for (int apart = 1; apart < 32; apart *= 2) {
    const Sum before = __shfl_up_sync(0xffffffffu, sum, apart);
    if (static_cast<int>(threadIdx.x) % 32 >= apart) sum = running.add(before, sum);
  }
  return sum;
}

// Returns the combination of the sums of the block's warps before this one, and writes that of all
// to `total`.
template <typename Sum>
__device__ Sum sum_before(const Running<Sum>& running, Sum of_this_warp, Sum& total) {
  __shared__ Sum of_warp[kThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[warp] = of_this_warp;
  __syncthreads();
  Sum before = running.nothing();
  total = running.nothing();
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) before = total;
    total = running.add(total, of_warp[w]);
  }
  return before;
}

// A block for each row, of which each warp owns kItems times 32 neighbouring elements at a time.
template <typename Sum, DType kType, int kItems>
__global__ void __launch_bounds__(kThreads) scan_kernel(const ScanRowsCall c, std::int64_t rows) {
  const Running<Sum> running{c.log_sum_exp};
  const std::int64_t step = c.x_strides.of[c.axis], out_step = c.out_strides.of[c.axis];
  const auto thread = static_cast<std::int64_t>(threadIdx.x), lane = thread % 32,
             warp = thread / 32;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t x = offset_of(c.rows, c.x_strides, row),
                       out = offset_of(c.rows, c.out_strides, row);
    Sum carried = running.nothing();
    for (std::int64_t begin = 0; begin < c.size; begin += kThreads * kItems) {
      const std::int64_t first = begin + warp * 32 * kItems + lane;
      const auto place = [&](int j) {
        const std::int64_t i = first + 32 * j;
        return c.reverse ? c.size - 1 - i : i;
      };
      Sum sums[kItems];  // up to each of this lane's elements
#pragma unroll
      for (int j = 0; j < kItems; ++j)
        sums[j] = first + 32 * j < c.size ? number_at<Sum>(c, kType, x + place(j) * step)
                                          : running.nothing();
      Sum of_this_warp = running.nothing();
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const Sum up_to = sum_up_to(running, sums[j]);
        sums[j] = running.add(of_this_warp, up_to);
        of_this_warp = running.add(of_this_warp, __shfl_sync(0xffffffffu, up_to, 31));
      }
      Sum total;
      const Sum before = running.add(carried, sum_before(running, of_this_warp, total));
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (first + 32 * j < c.size)
          write_sum(c, kType, out + place(j) * out_step, running.add(before, sums[j]));
      }
      carried = running.add(carried, total);
    }
  }
}

// A thread for each row, where neighbouring rows are neighbours in memory.
template <typename Sum>
__global__ void __launch_bounds__(kThreads)
    scan_columns_kernel(const ScanRowsCall c, std::int64_t rows) {
  const Running<Sum> running{c.log_sum_exp};
  const std::int64_t step = c.x_strides.of[c.axis], out_step = c.out_strides.of[c.axis];
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows;
       row += threads) {
    const std::int64_t x = offset_of(c.rows, c.x_strides, row),
                       out = offset_of(c.rows, c.out_strides, row);
    Sum sum = running.nothing();
    for (std::int64_t i = 0; i < c.size; ++i) {
      const std::int64_t k = c.reverse ? c.size - 1 - i : i;
      sum = running.add(sum, number_at<Sum>(c, c.dtype, x + k * step));
      write_sum(c, c.dtype, out + k * out_step, sum);
    }
  }
}

template <typename Sum, DType kType>
void scan_as(const ScanRowsCall& c, std::int64_t rows) {
  constexpr std::int64_t kShort = 32, kMany = 4096, kLong = 2048;
  const bool columns = c.size <= kShort || (rows >= kMany && c.x_strides.of[c.axis] != 1);
  if (columns) {
    scan_columns_kernel<Sum>
        <<<blocks_of(rows, kThreads), kThreads, 0, stream_of(c.stream)>>>(c, rows);
  } else if (c.size < kLong) {
    scan_kernel<Sum, kType, 1><<<blocks_of(rows, 1), kThreads, 0, stream_of(c.stream)>>>(c, rows);
  } else {
    scan_kernel<Sum, kType, 8><<<blocks_of(rows, 1), kThreads, 0, stream_of(c.stream)>>>(c, rows);
  }
}

}  // namespace

void sort_rows(const SortRowsCall& c) {
  const std::int64_t rows = count_of(c.rows);
  if (rows == 0 || c.kept == 0) return;
  if (sorts_by_digits(c)) return sort_rows_by_digits(c, rows);
  if (c.dtype == DType::i64) {
    sort_as<std::int64_t, std::uint64_t>(c, rows);
  } else if (c.dtype == DType::i32) {
    sort_as<std::int32_t, std::uint32_t>(c, rows);
  } else if (c.dtype == DType::f64) {
    sort_as<double, std::uint64_t>(c, rows);
  } else {
    sort_as<float, std::uint32_t>(c, rows);
  }
  require_cuda(cudaGetLastError(), "sort");
}

void scan_rows(const ScanRowsCall& c) {
  const std::int64_t rows = count_of(c.rows);
  if (rows == 0 || c.size == 0) return;
  switch (c.dtype) {
    case DType::f32:
      scan_as<double, DType::f32>(c, rows);
      break;
    case DType::f64:
      scan_as<double, DType::f64>(c, rows);
      break;
    case DType::bf16:
      scan_as<double, DType::bf16>(c, rows);
      break;
    case DType::f16:
      scan_as<double, DType::f16>(c, rows);
      break;
    case DType::i32:
      scan_as<std::uint64_t, DType::i32>(c, rows);
      break;
    case DType::i64:
      scan_as<std::uint64_t, DType::i64>(c, rows);
      break;
    case DType::i8:
      scan_as<double, DType::i8>(c, rows);
      break;
  }
  require_cuda(cudaGetLastError(), "running sums");
}

}  // namespace logitless::cuda

// Sorting of rows.
#include <algorithm>
#include <bit>

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

}  // namespace logitless::cuda

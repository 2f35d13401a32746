// Additions at indices along an axis.
#include <algorithm>
#include <bit>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/tensor/element.cuh"
#include "kernels/cuda/tensor/strided.cuh"
#include "kernels/device/index.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostThreads = 512;         // of a block that owns a row
constexpr int kSlots = 4096;              // of such a block, in shared memory
constexpr std::int64_t kFewUpdates = 32;  // of a row: a thread adds them

// Offsets of an update in its three tensors.
struct Offsets {
  std::int64_t index, update, out;
};
template <typename Int>
__device__ Offsets offsets_of(const PutCall& c, Int row) {
  std::int64_t at[3] = {};
  add_offsets(c.space, row, at, c.index_strides, c.update_strides, c.out_strides);
  return {at[0], at[1], at[2]};
}

// A thread for each row adds its updates in order. Sum: unsigned for integers, which wrap.
template <typename Sum>
__global__ void __launch_bounds__(kThreads) put_few_kernel(const PutCall c, std::int64_t rows) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows; i += step) {
    const Offsets at = offsets_of(c, i);
    Sum* const out = static_cast<Sum*>(c.out) + at.out;
    for (std::int64_t k = 0; k < c.count; ++k) {
      const std::int64_t to =
          index_at(c.index, c.index_dtype, at.index + k * c.index_strides.of[c.axis]);
      if (to < 0 || to >= c.size) continue;
      out[to * c.out_strides.of[c.axis]] +=
          load<Sum>(c.updates, c.dtype, at.update + k * c.update_strides.of[c.axis]);
    }
  }
}

// A block for each part of a row of the result takes as many updates at a time as it has threads.
// Each round adds the first of the updates with the same slot, so that an element's updates are
// added in order. `part`: elements of a part.
template <typename Sum>
__global__ void __launch_bounds__(kMostThreads)
    put_kernel(const PutCall c, std::int64_t parts, std::int64_t part) {
  constexpr unsigned kRounds = 1u << 20;
  // The round, which counts down, and the least thread; both are less in each round than before.
  __shared__ unsigned slots[kSlots];
  const Offsets at = offsets_of(c, static_cast<std::int64_t>(blockIdx.x) / parts);
  const std::int64_t begin = blockIdx.x % parts * part, end = min(begin + part, c.size);
  Sum* const out = static_cast<Sum*>(c.out) + at.out;
  unsigned round = 0;
  for (std::int64_t first = 0; first < c.count; first += blockDim.x) {
    const std::int64_t k = first + threadIdx.x;
    const std::int64_t to =
        k < c.count ? index_at(c.index, c.index_dtype, at.index + k * c.index_strides.of[c.axis])
                    : -1;
    bool pending = to >= begin && to < end;
    Sum update = 0;
    if (pending)
      update = load<Sum>(c.updates, c.dtype, at.update + k * c.update_strides.of[c.axis]);
    unsigned& slot = slots[static_cast<unsigned>(to) % kSlots];
    while (__syncthreads_or(pending)) {
      if (round == 0) {
        for (unsigned i = threadIdx.x; i < kSlots; i += blockDim.x) slots[i] = ~0u;
        round = kRounds;
        __syncthreads();
      }
      const unsigned mine = --round * kMostThreads + threadIdx.x;
      if (pending) atomicMin(&slot, mine);
      __syncthreads();
      if (pending && slot == mine) {
        out[to * c.out_strides.of[c.axis]] += update;
        pending = false;
      }
    }
  }
}

// A thread for each update, where no two of a row have one index.
template <typename Sum, typename Int>
__global__ void __launch_bounds__(kThreads)
    put_distinct_kernel(const PutCall c, std::int64_t rows, bool along_axis) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads, updates = rows * c.count;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < updates; i += step) {
    const Int flat = static_cast<Int>(i), size = static_cast<Int>(along_axis ? c.count : rows);
    const Int outer = flat / size, inner = flat % size;
    const Offsets at = offsets_of(c, along_axis ? outer : inner);
    const std::int64_t k = along_axis ? inner : outer;
    const std::int64_t to =
        index_at(c.index, c.index_dtype, at.index + k * c.index_strides.of[c.axis]);
    if (to < 0 || to >= c.size) continue;
    const std::int64_t there = at.out + to * c.out_strides.of[c.axis];
    const Sum old = c.whole ? Sum{0} : load<Sum>(c.out, c.out_dtype, there);
    const Sum update = load<Sum>(c.updates, c.dtype, at.update + k * c.update_strides.of[c.axis]);
    store(c.out, c.out_dtype, there, old + update);
  }
}

// A block for each row of `whole` puts of one dtype collects the elements in shared memory. A sum
// of 0 and -0 is 0: `zero` are the bits of -0, or 0.
template <typename Word>
__global__ void __launch_bounds__(kMostThreads)
    put_rows_kernel(const PutCall c, std::int64_t rows, Word zero) {
  constexpr int kAhead = 4;
  extern __shared__ std::uint64_t memory[];
  auto* const row = reinterpret_cast<Word*>(memory);
  const auto threads = static_cast<std::int64_t>(blockDim.x);
  for (std::int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const Offsets at = offsets_of(c, i);
    const Word* const updates = static_cast<const Word*>(c.updates) + at.update;
    const std::int64_t step = c.update_strides.of[c.axis];
    for (std::int64_t first = threadIdx.x; first < c.count; first += threads * kAhead) {
      std::int64_t to[kAhead];
      Word update[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const std::int64_t k = first + a * threads;
        to[a] = k < c.count ? index_at(c.index, c.index_dtype, at.index + k) : -1;
        update[a] = k < c.count ? updates[k * step] : Word{0};
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (to[a] >= 0 && to[a] < c.size) row[to[a]] = update[a] == zero ? Word{0} : update[a];
      }
    }
    __syncthreads();
    Word* const out = static_cast<Word*>(c.out) + at.out;
    for (std::int64_t k = threadIdx.x; k < c.size; k += threads) out[k] = row[k];
    __syncthreads();
  }
}
bool puts_rows(const PutCall& c) {
  constexpr std::int64_t kLeast = 512, kOthers = 1024;  // bytes that the system takes
  return c.whole && c.dtype == c.out_dtype && c.size >= kLeast && c.index_strides.of[c.axis] == 1 &&
         c.out_strides.of[c.axis] == 1 &&
         c.size * static_cast<std::int64_t>(size_of(c.dtype)) + kOthers <= most_shared_bytes();
}
template <typename Word>
void put_rows(const PutCall& c, std::int64_t rows) {
  const auto kernel = put_rows_kernel<Word>;
  allow_shared(kernel, most_shared_bytes() - 1024);
  const Word zero =
      is_index(c.dtype) ? Word{0} : static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  kernel<<<blocks_of(rows, 1), kMostThreads, static_cast<std::size_t>(c.size) * sizeof(Word),
           stream_of(c.stream)>>>(c, rows, zero);
}

template <typename Sum>
void put_as(const PutCall& c, std::int64_t rows) {
  cudaStream_t const stream = stream_of(c.stream);
  if (c.distinct) {
    const std::int64_t updates = rows * c.count;
    const bool along_axis = c.index_strides.of[c.axis] == 1;
    const unsigned blocks = blocks_of(updates, kThreads);
    if (updates < std::int64_t{1} << 32) {
      put_distinct_kernel<Sum, std::uint32_t><<<blocks, kThreads, 0, stream>>>(c, rows, along_axis);
    } else {
      put_distinct_kernel<Sum, std::uint64_t><<<blocks, kThreads, 0, stream>>>(c, rows, along_axis);
    }
    return;
  }
  if (c.count <= kFewUpdates) {
    put_few_kernel<Sum><<<blocks_of(rows, kThreads), kThreads, 0, stream>>>(c, rows);
    return;
  }
  // Few rows are cut into parts, each of which reads all indices.
  constexpr std::int64_t kLeast = 1024, kMostParts = 64;
  const std::int64_t enough = 4 * processor_count();
  const std::int64_t wanted =
      std::clamp<std::int64_t>(std::min(enough / rows, c.size / kLeast), 1, kMostParts);
  const std::int64_t part = (c.size + wanted - 1) / wanted;
  const std::int64_t parts = (c.size + part - 1) / part;
  const auto threads = static_cast<unsigned>(
      std::min<std::uint64_t>(std::bit_ceil(static_cast<std::uint64_t>(c.count)), kMostThreads));
  put_kernel<Sum><<<static_cast<unsigned>(rows * parts), threads, 0, stream>>>(c, parts, part);
}

}  // namespace

void put_elements(const PutCall& c) {
  const std::int64_t rows = count_of(c.space);
  if (rows == 0 || c.count == 0 || c.size == 0) return;
  if (puts_rows(c)) {
    switch (size_of(c.dtype)) {
      case 2:
        put_rows<std::uint16_t>(c, rows);
        break;
      case 4:
        put_rows<std::uint32_t>(c, rows);
        break;
      default:
        put_rows<std::uint64_t>(c, rows);
    }
    require_cuda(cudaGetLastError(), "put");
    return;
  }
  switch (c.out_dtype) {
    case DType::f64:
      put_as<double>(c, rows);
      break;
    case DType::i32:
      put_as<std::uint32_t>(c, rows);
      break;
    case DType::i64:
      put_as<std::uint64_t>(c, rows);
      break;
    default:
      put_as<float>(c, rows);
  }
  require_cuda(cudaGetLastError(), "put");
}

}  // namespace logitless::cuda

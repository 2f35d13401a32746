// A stable radix sort of each row by digits of 8 bits, the lowest first. A block owns a row. It
// sorts indices, and reads their keys in each pass from the row, or from a copy in shared memory.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/tensor/radix_sort.h"
#include "kernels/cuda/tensor/strided.cuh"

namespace logitless::cuda {
namespace {

constexpr int kDigits = 256;
constexpr int kMostThreads = 1024;
constexpr int kAhead = 4;                      // elements whose keys a lane loads at a time
constexpr std::int64_t kLeastKept = 1024;      // fewer are found by fewer passes over the row
constexpr std::int64_t kMostInShared = 65536;  // indices of 16 bits

// Returns unsigned numbers in the order of the elements with these bits. Both zeros are equal, and
// all NaNs.
template <typename Word>
__device__ Word key_of(Word bits, DType dtype) {
  constexpr int kBits = 8 * static_cast<int>(sizeof(Word));
  constexpr Word kSign = static_cast<Word>(Word{1} << (kBits - 1));
  if (dtype == DType::i32 || dtype == DType::i64) return static_cast<Word>(bits ^ kSign);
  Word infinity;
  if constexpr (sizeof(Word) == 2) {
    infinity = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
  } else if constexpr (sizeof(Word) == 4) {
    infinity = 0x7f800000u;
  } else {
    infinity = 0x7ff0000000000000ull;
  }
  const Word size = bits & static_cast<Word>(~kSign);
  if (size > infinity) return static_cast<Word>(~Word{0});
  if (size == 0) return kSign;
  return static_cast<Word>(bits & kSign ? ~bits : bits | kSign);
}

// Two lists of a row's indices in shared memory.
struct SharedLists {
  std::uint16_t* lists;
  unsigned size;
  __device__ unsigned get(int list, unsigned i) const { return lists[list * size + i]; }
  __device__ void set(int list, unsigned i, unsigned at) const {
    lists[list * size + i] = static_cast<std::uint16_t>(at);
  }
};
// Two lists in the memory of the sorted indices, one in each half of an element.
struct ResultLists {
  std::uint32_t* lists;
  std::int64_t step;  // of halves
  __device__ unsigned get(int list, unsigned i) const { return lists[i * step + list]; }
  __device__ void set(int list, unsigned i, unsigned at) const { lists[i * step + list] = at; }
};

// A row in memory, and its copy in shared memory.
template <typename Word>
struct StridedRow {
  const Word* x;
  std::int64_t step;
  __device__ Word get(unsigned at) const { return x[at * step]; }
};
template <typename Word>
struct SharedRow {
  const Word* copy;
  __device__ Word get(unsigned at) const { return copy[at]; }
};

// Returns the lanes of the warp with this lane's digit, among those that are live.
__device__ unsigned lanes_with(int digit, bool live) {
  unsigned same = __ballot_sync(0xffffffffu, live);
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    const bool set = digit >> bit & 1;
    const unsigned lanes = __ballot_sync(0xffffffffu, set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

// The state of a block's sort of one row. A warp owns a range of the list.
template <typename Word, typename Lists, typename Row>
struct RowSort {
  const Lists lists;
  const Row row;
  const DType dtype;
  const Word inverted;  // all bits to sort in descending order
  const unsigned begin, end;
  int list = -1;  // that holds the order so far; -1: the elements' own order

  __device__ unsigned index_at(unsigned k) const { return list < 0 ? k : lists.get(list, k); }
  __device__ int digit_of(unsigned at, int shift) const {
    const auto key = static_cast<Word>(key_of(row.get(at), dtype) ^ inverted);
    return static_cast<int>(key >> shift & (kDigits - 1));
  }
  // Calls visit(index, digit, lanes with this digit) for the warp's elements in order, 32 at a
  // time. Lanes beyond the end visit with no lanes.
  template <typename Visit>
  __device__ void each(int shift, const Visit& visit) const {
    const unsigned lane = threadIdx.x % 32;
    for (unsigned first = begin; first < end; first += 32 * kAhead) {
      unsigned at[kAhead];
      int digit[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const unsigned k = first + 32 * a + lane;
        at[a] = k < end ? index_at(k) : 0;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        digit[a] = first + 32 * a + lane < end ? digit_of(at[a], shift) : 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const bool live = first + 32 * a + lane < end;
        const unsigned same = lanes_with(digit[a], live);
        visit(at[a], digit[a], live ? same : 0);
      }
    }
  }
};

// Writes the sums of the digits' counts before each digit to `before`, and to count[w] those of a
// digit in the warps before w. Returns whether all elements have one digit; `before` is not
// written then.
__device__ bool sum_counts(unsigned* count, unsigned* before, unsigned size) {
  __shared__ unsigned of_warp[kDigits / 32];
  const int digit = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / 32;
  unsigned total = 0;
  if (digit < kDigits) {
    for (int w = 0; w < warps; ++w) {
      const unsigned n = count[w * kDigits + digit];
      count[w * kDigits + digit] = total;
      total += n;
    }
  }
  if (__syncthreads_or(total == size)) return true;
  unsigned up_to = total;
  for (int apart = 1; apart < 32; apart *= 2) {
    const unsigned below = __shfl_up_sync(0xffffffffu, up_to, apart);
    if (digit % 32 >= apart) up_to += below;
  }
  if (digit < kDigits && digit % 32 == 31) of_warp[digit / 32] = up_to;
  __syncthreads();
  if (digit < kDigits) {
    unsigned sum = up_to - total;
    for (int w = 0; w < digit / 32; ++w) sum += of_warp[w];
    before[digit] = sum;
  }
  __syncthreads();
  return false;
}

// Shared memory: the digits' counts of each warp, the copy of the row if there is one, then lists
// that are not in the result.
template <typename Word, typename Lists, bool kCopies>
__global__ void __launch_bounds__(kMostThreads)
    radix_sort_kernel(const SortRowsCall c, std::int64_t rows) {
  using Row = std::conditional_t<kCopies, SharedRow<Word>, StridedRow<Word>>;
  extern __shared__ unsigned memory[];
  __shared__ unsigned before[kDigits];
  const auto threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32;
  const auto size = static_cast<unsigned>(c.size);
  const std::int64_t step = c.x_strides.of[c.axis];
  const unsigned of_warp = ((size + warps - 1) / warps + 31) / 32 * 32;
  unsigned* const count = memory;
  unsigned* const mine = count + warp * kDigits;
  auto* const copy = reinterpret_cast<Word*>(count + warps * kDigits);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    std::int64_t* const index = c.index + offset_of(c.rows, c.index_strides, row);
    const Word* const x = static_cast<const Word*>(c.x) + offset_of(c.rows, c.x_strides, row);
    Lists lists;
    if constexpr (std::is_same_v<Lists, SharedLists>) {
      lists = {reinterpret_cast<std::uint16_t*>(copy + (kCopies ? size : 0)), size};
    } else {
      lists = {reinterpret_cast<std::uint32_t*>(index), 2 * c.index_strides.of[c.axis]};
    }
    Row from;
    if constexpr (kCopies) {
      __syncthreads();
      for (unsigned k = threadIdx.x; k < size; k += threads) copy[k] = x[k * step];
      from = {copy};
    } else {
      from = {x, step};
    }
    RowSort<Word, Lists, Row> sort{lists,
                                   from,
                                   c.dtype,
                                   static_cast<Word>(c.descending ? ~Word{0} : Word{0}),
                                   min(warp * of_warp, size),
                                   min((warp + 1) * of_warp, size)};
    for (int shift = 0; shift < 8 * static_cast<int>(sizeof(Word)); shift += 8) {
      __syncthreads();
      for (unsigned i = threadIdx.x; i < warps * kDigits; i += threads) count[i] = 0;
      __syncthreads();
      const unsigned lower = (1u << threadIdx.x % 32) - 1;
      sort.each(shift, [&](unsigned, int digit, unsigned same) {
        if (same != 0 && (same & lower) == 0) mine[digit] += __popc(same);
        __syncwarp();
      });
      __syncthreads();
      if (sum_counts(count, before, size)) continue;
      const int to = sort.list == 0 ? 1 : 0;
      sort.each(shift, [&](unsigned at, int digit, unsigned same) {
        const unsigned first = mine[digit];
        __syncwarp();
        if (same != 0) {
          if ((same & lower) == 0) mine[digit] = first + __popc(same);
          lists.set(to, before[digit] + first + __popc(same & lower), at);
        }
        __syncwarp();
      });
      sort.list = to;
    }
    __syncthreads();
    Word* const values = static_cast<Word*>(c.values) + offset_of(c.rows, c.value_strides, row);
    for (unsigned k = threadIdx.x; k < c.kept; k += threads) {
      const unsigned at = sort.index_at(k);
      values[k * c.value_strides.of[c.axis]] = from.get(at);
      index[k * c.index_strides.of[c.axis]] = at;
    }
  }
}

int threads_of(std::int64_t size) { return size > 8192 ? kMostThreads : kDigits; }
std::int64_t bytes_of_counts(std::int64_t size) {
  return threads_of(size) / 32 * kDigits * static_cast<std::int64_t>(sizeof(unsigned));
}
std::int64_t bytes_of_lists(std::int64_t size) {
  return 2 * size * static_cast<std::int64_t>(sizeof(std::uint16_t));
}
// Returns the bytes of dynamic shared memory of a block, beside the kernel's own.
int most_bytes() { return most_shared_bytes() - 2048; }
// Returns whether lists fit into shared memory beside the counts, and `more` bytes of an element.
bool fits_shared(std::int64_t size, std::int64_t more = 0) {
  return size <= kMostInShared &&
         bytes_of_counts(size) + bytes_of_lists(size) + more * size <= most_bytes();
}

template <typename Word, typename Lists, bool kCopies>
void launch(const SortRowsCall& c, std::int64_t rows) {
  constexpr bool kShared = std::is_same_v<Lists, SharedLists>;
  const std::int64_t bytes = bytes_of_counts(c.size) + (kShared ? bytes_of_lists(c.size) : 0) +
                             (kCopies ? c.size * static_cast<std::int64_t>(sizeof(Word)) : 0);
  const auto kernel = radix_sort_kernel<Word, Lists, kCopies>;
  if (kShared) allow_shared(kernel, most_bytes());
  kernel<<<blocks_of(rows, 1), static_cast<unsigned>(threads_of(c.size)),
           static_cast<std::size_t>(bytes), stream_of(c.stream)>>>(c, rows);
  require_cuda(cudaGetLastError(), "sort by digits");
}
template <typename Word>
void sort_words(const SortRowsCall& c, std::int64_t rows) {
  if (fits_shared(c.size, sizeof(Word))) {
    launch<Word, SharedLists, true>(c, rows);
  } else if (fits_shared(c.size)) {
    launch<Word, SharedLists, false>(c, rows);
  } else {
    launch<Word, ResultLists, false>(c, rows);
  }
}

}  // namespace

bool sorts_by_digits(const SortRowsCall& c) {
  return c.kept > kLeastKept && (c.kept == c.size || fits_shared(c.size));
}

void sort_rows_by_digits(const SortRowsCall& c, std::int64_t rows) {
  switch (size_of(c.dtype)) {
    case 2:
      return sort_words<std::uint16_t>(c, rows);
    case 4:
      return sort_words<std::uint32_t>(c, rows);
    default:
      return sort_words<std::uint64_t>(c, rows);
  }
}

}  // namespace logitless::cuda

// Sorts a chunk's targets by vocabulary entry.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/gradient.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(std::int64_t count) {
  return static_cast<unsigned>(std::max<std::int64_t>(1, (count + kThreads - 1) / kThreads));
}

__device__ __forceinline__ std::int32_t row_or_none(const ForwardCall& c, std::int64_t slot) {
  const std::int64_t vocab_id = target_of(c, slot);
  return is_local(c, vocab_id) ? static_cast<std::int32_t>(row_of_vocab_id(c, vocab_id))
                               : kNoVocabId;
}

__global__ void __launch_bounds__(kThreads)
    read_vocab(const ForwardCall c, std::int32_t* vocab_ids) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= c.shape.tokens * c.shape.targets_per_token) return;
  vocab_ids[slot] = row_or_none(c, slot);
}

constexpr std::int32_t kOthers = 512;  // slots that one thread block compares

// Adds to `places` [count], initially 0, the number of slots that come before each.
__global__ void __launch_bounds__(kThreads)
    rank_slots(const std::int32_t* vocab_ids, std::int32_t count, std::int32_t* places) {
  __shared__ std::int32_t others[kOthers];
  const auto first = static_cast<std::int32_t>(blockIdx.y) * kOthers;
  const std::int32_t length = min(kOthers, count - first);
  for (std::int32_t i = threadIdx.x; i < length; i += kThreads) others[i] = vocab_ids[first + i];
  __syncthreads();
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (slot >= count) return;
  const std::int32_t vocab_id = vocab_ids[slot];
  std::int32_t before = 0;
#pragma unroll 8
  for (std::int32_t i = 0; i < length; ++i)
    before += others[i] < vocab_id || (others[i] == vocab_id && first + i < slot) ? 1 : 0;
  atomicAdd(places + slot, before);  // of integers: the order does not matter
}

// Slots in the order of their keys, in the shared memory of a thread block that has a thread for
// each.
constexpr auto kOneBlock = static_cast<std::int32_t>(kSortedInBlock);
struct SortedSlots {
  std::int32_t vocab_ids[kOneBlock];  // by slot
  std::int32_t slots[kOneBlock];      // in order
};
// vocab_id_of(slot) is the key. Returns the calling thread's.
template <typename VocabIdOf>
__device__ __forceinline__ std::int32_t sort_in_block(const VocabIdOf& vocab_id_of,
                                                      std::int32_t count, SortedSlots& sorted) {
  const auto slot = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t vocab_id = slot < count ? vocab_id_of(slot) : kNoVocabId;
  sorted.vocab_ids[slot] = vocab_id;
  __syncthreads();
  if (slot < count) {
    std::int32_t place = 0;
#pragma unroll 8
    for (std::int32_t i = 0; i < count; ++i)
      place += sorted.vocab_ids[i] < vocab_id || (sorted.vocab_ids[i] == vocab_id && i < slot);
    sorted.slots[place] = slot;
  }
  __syncthreads();
  return vocab_id;
}
__global__ void __launch_bounds__(kOneBlock)
    order_block_of_keys(const TargetOrder order, std::int32_t count) {
  __shared__ SortedSlots sorted;
  sort_in_block([&](std::int32_t slot) { return order.vocab_ids[slot]; }, count, sorted);
  if (threadIdx.x < count) order.slots[threadIdx.x] = sorted.slots[threadIdx.x];
}

// Counting sort: histogram, prefix sums, scatter in any order among equals, then rank among equals.
// Key `vocab` stands for none.
__device__ __forceinline__ std::int32_t counted_vocab_id(std::int32_t vocab_id,
                                                         std::int32_t vocab) {
  return vocab_id == kNoVocabId ? vocab : vocab_id;
}
__global__ void __launch_bounds__(kThreads)
    count_vocab(const std::int32_t* vocab_ids, std::int32_t count, std::int32_t vocab,
                std::int32_t* counts) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (slot < count) atomicAdd(counts + counted_vocab_id(vocab_ids[slot], vocab) + 1, 1);
}

constexpr int kScanThreads = 1024;
// counts[j] = sum of counts[0 .. j], and a copy; one block.
__global__ void __launch_bounds__(kScanThreads)
    sum_counts(std::int32_t* counts, std::int32_t length, std::int32_t* copy) {
  __shared__ std::int32_t sums[kScanThreads];
  const std::int32_t run = (length + kScanThreads - 1) / kScanThreads;
  const std::int32_t begin = min(length, static_cast<std::int32_t>(threadIdx.x) * run);
  const std::int32_t end = min(length, begin + run);
  std::int32_t mine = 0;
  for (std::int32_t j = begin; j < end; ++j) mine += counts[j];
  sums[threadIdx.x] = mine;
  __syncthreads();
  for (int step = 1; step < kScanThreads; step *= 2) {
    const std::int32_t before =
        static_cast<int>(threadIdx.x) >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  std::int32_t total = sums[threadIdx.x] - mine;
  for (std::int32_t j = begin; j < end; ++j) {
    total += counts[j];
    counts[j] = total;
    copy[j] = total;
  }
}
__global__ void __launch_bounds__(kThreads)
    scatter_slots(const std::int32_t* vocab_ids, std::int32_t count, std::int32_t vocab,
                  std::int32_t* next, std::int32_t* slots) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (slot < count) slots[atomicAdd(next + counted_vocab_id(vocab_ids[slot], vocab), 1)] = slot;
}
__global__ void __launch_bounds__(kThreads)
    rank_equals(const std::int32_t* vocab_ids, std::int32_t count, std::int32_t vocab,
                const std::int32_t* counts, const std::int32_t* scattered, std::int32_t* places) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (slot >= count) return;
  const std::int32_t vocab_id = counted_vocab_id(vocab_ids[slot], vocab);
  if (vocab_id == vocab) {  // nothing reads these: they are not sorted
    places[slot] = -1;
    return;
  }
  const std::int32_t first = counts[vocab_id];
  std::int32_t place = first;
  const std::int32_t end = counts[vocab_id + 1];
  for (std::int32_t i = first; i < end; ++i) place += scattered[i] < slot ? 1 : 0;
  places[slot] = place;
}

__global__ void __launch_bounds__(kThreads)
    place_slots(const std::int32_t* places, std::int32_t count, std::int32_t* slots) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (slot < count && places[slot] >= 0) slots[places[slot]] = slot;
}

// Writes begin[at] of the block's vocabulary entries by binary search in the sorted targets, and
// target `at` of them. vocab_ids by slot, slots in order.
__device__ __forceinline__ void write_entry(const BlockCall& b, std::int64_t at,
                                            const std::int32_t* vocab_ids,
                                            const std::int32_t* slots, std::int32_t count,
                                            const TargetEntries& entries) {
  if (at <= b.vocab_count) {
    const std::int64_t vocab_id = b.vocab_begin + at;
    std::int32_t low = 0;
    std::int32_t high = count;
    while (low < high) {
      const std::int32_t middle = (low + high) / 2;
      if (vocab_ids[slots[middle]] < vocab_id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    entries.begin[at] = low;
  }
  if (at < count) {
    const std::int32_t slot = slots[at];
    entries.vocab_ids[at] = vocab_ids[slot];
    const int row = slot / b.chunk.shape.targets_per_token;
    const std::int32_t* const rows = b.chunk.original.rows;
    entries.tokens[at] = rows == nullptr ? row : rows[row];
    entries.coefficients[at] = b.coefficient[slot];
  }
}
__global__ void __launch_bounds__(kThreads)
    write_entries(const BlockCall b, const TargetOrder order, std::int32_t count,
                  const TargetEntries entries) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  write_entry(b, at, order.vocab_ids, order.slots, count, entries);
}
__global__ void __launch_bounds__(kThreads)
    add_coefficients(const TargetEntries entries, std::int64_t vocab_count, float* d_bias) {
  const std::int64_t vocab_id = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vocab_id >= vocab_count) return;
  const std::int32_t begin = entries.begin[vocab_id];
  const std::int32_t end = entries.begin[vocab_id + 1];
  if (begin == end) return;
  double sum = 0.0;
  for (std::int32_t e = begin; e < end; ++e) sum += static_cast<double>(entries.coefficients[e]);
  d_bias[vocab_id] += static_cast<float>(sum);
}

// Sums the entries [first, end) in one column of hidden. coefficient_of(e), token_of(e).
template <typename T, typename Coefficient, typename Token>
__device__ __forceinline__ float sum_entries(const T* column, std::int64_t stride,
                                             std::int32_t first, std::int32_t end,
                                             const Coefficient& coefficient_of,
                                             const Token& token_of) {
  float sum = 0.0f;
#pragma unroll 4
  for (std::int32_t e = first; e < end; ++e)
    sum = fmaf(coefficient_of(e), as_float(column[token_of(e) * stride]), sum);
  return sum;
}
template <typename T>
__device__ float sum_entries(const GradientGemmsCall& c, std::int32_t first, std::int32_t end,
                             std::int64_t column) {
  return sum_entries(
      static_cast<const T*>(c.hidden) + column, c.hidden_stride, first, end,
      [&](std::int32_t e) { return c.entries.coefficients[e]; },
      [&](std::int32_t e) { return c.entries.tokens[e]; });
}

// d_weight += coefficients * hidden. The entries of the block are adjacent, and thread blocks share
// them, each for 256 columns. The thread block with a vocabulary entry's first target sums all of
// them, in order.
constexpr std::int64_t kEntryBlocks = 1024;
template <typename T>
__global__ void __launch_bounds__(kThreads) add_entries(const GradientGemmsCall c) {
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= c.dim) return;
  const std::int32_t end = c.entries.begin[c.block_vocab];
  for (std::int32_t first = c.entries.begin[0] + static_cast<std::int32_t>(blockIdx.x); first < end;
       first += static_cast<std::int32_t>(gridDim.x)) {
    const std::int32_t vocab_id = c.entries.vocab_ids[first] - c.vocab_begin;
    if (c.entries.begin[vocab_id] != first) continue;
    static_cast<float*>(c.d_weight.data)[vocab_id * c.d_weight.stride + column] +=
        sum_entries<T>(c, first, c.entries.begin[vocab_id + 1], column);
  }
}

// A thread block for 256 columns of a row of `many`. It sums the one vocabulary entry with many
// targets whose first target is in this row's slots, if there is one.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_vocab(const GradientGemmsCall c) {
  const std::int64_t slots = c.tokens * c.targets_per_token;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  __shared__ std::int32_t found[2];  // its targets, [begin, end)
  if (threadIdx.x == 0) found[0] = found[1] = 0;
  __syncthreads();
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kFewEntries + 1) + threadIdx.x;
  if (threadIdx.x <= kFewEntries && first < slots) {
    const std::int32_t vocab_id = c.entries.vocab_ids[first] - c.vocab_begin;
    if (vocab_id >= 0 && vocab_id < c.block_vocab && c.entries.begin[vocab_id] == first &&
        c.entries.begin[vocab_id + 1] - first > kFewEntries) {
      found[0] = static_cast<std::int32_t>(first);
      found[1] = c.entries.begin[vocab_id + 1];
    }
  }
  __syncthreads();
  if (found[0] < found[1] && column < c.dim)
    c.entries.many[blockIdx.x * c.dim + column] = sum_entries<T>(c, found[0], found[1], column);
}

// The rows of hidden of TargetEntries::tokens.
__host__ __device__ ListedRows rows_of_entries(const ForwardCall& c) {
  return c.original.data != nullptr ? c.original : ListedRows{c.hidden, c.hidden_stride, nullptr};
}

// sum_vocab from sorted targets, for kOneBlock columns.
template <typename T>
__device__ __forceinline__ void sum_vocab_of_sorted(const BlockCall& b, const SortedSlots& sorted,
                                                    std::int32_t count, int part, float* many) {
  const std::int64_t dim = b.chunk.shape.dim;
  const auto across = static_cast<int>((dim + kOneBlock - 1) / kOneBlock);
  const int row = part / across;
  const std::int64_t column = std::int64_t{part % across} * kOneBlock + threadIdx.x;
  const auto vocab_id_at = [&](std::int32_t e) { return sorted.vocab_ids[sorted.slots[e]]; };
  const auto starts_many = [&](std::int32_t e) {
    const std::int64_t vocab_id = vocab_id_at(e);
    return vocab_id >= b.vocab_begin && vocab_id < b.vocab_begin + b.vocab_count &&
           (e == 0 || vocab_id_at(e - 1) != vocab_id) && vocab_id_at(e + kFewEntries) == vocab_id;
  };
  const std::int32_t last = min((row + 1) * (kFewEntries + 1), count - kFewEntries);
  std::int32_t first = row * (kFewEntries + 1);
  while (first < last && !starts_many(first)) ++first;
  if (first >= last || column >= dim) return;
  std::int32_t end = first + kFewEntries + 1;
  while (end < count && vocab_id_at(end) == vocab_id_at(first)) ++end;
  const ListedRows hidden = rows_of_entries(b.chunk);
  many[row * dim + column] = sum_entries(
      static_cast<const T*>(hidden.data) + column, hidden.stride, first, end,
      [&](std::int32_t e) { return b.coefficient[sorted.slots[e]]; },
      [&](std::int32_t e) {
        const int token = sorted.slots[e] / b.chunk.shape.targets_per_token;
        return hidden.rows == nullptr ? token : hidden.rows[token];
      });
}

// Every thread block sorts all targets for itself, which takes less time than another launch. The
// first `blocks` write the entries, the others sum those of frequent ones.
template <typename T>
__global__ void __launch_bounds__(kOneBlock)
    list_few(const BlockCall b, const TargetOrder order, std::int32_t count,
             const TargetEntries entries, int blocks) {
  __shared__ SortedSlots sorted;
  const std::int32_t mine =
      sort_in_block([&](std::int32_t slot) { return row_or_none(b.chunk, slot); }, count, sorted);
  const int part = static_cast<int>(blockIdx.x) - blocks;
  if (part >= 0) return sum_vocab_of_sorted<T>(b, sorted, count, part, entries.many);
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kOneBlock + threadIdx.x;
  if (at < count) order.vocab_ids[at] = mine;
  write_entry(b, at, sorted.vocab_ids, sorted.slots, count, entries);
}

}  // namespace

void order_targets(const ForwardCall& c, const TargetOrder& order) {
  const std::int64_t count = c.shape.tokens * c.shape.targets_per_token;
  if (count <= kOneBlock) return;  // list_targets sorts them
  read_vocab<<<blocks_of(count), kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(
      c, order.vocab_ids);
  require_cuda(cudaGetLastError(), "vocabulary entries of the targets");
  order_keys(order, count, c.shape.vocab, c.stream);
}

void order_keys(const TargetOrder& order, std::int64_t count, std::int64_t bound, Stream of_call) {
  const auto stream = static_cast<cudaStream_t>(of_call);
  const auto slots = static_cast<std::int32_t>(count);
  if (count <= kOneBlock) {
    order_block_of_keys<<<1, kOneBlock, 0, stream>>>(order, slots);
    return require_cuda(cudaGetLastError(), "order of the targets");
  }
  if (count <= kFewTargets) {
    require_cuda(cudaMemsetAsync(order.places, 0, static_cast<std::size_t>(count) * 4, stream),
                 "order of the targets");
    const dim3 pairs(blocks_of(count), static_cast<unsigned>((count + kOthers - 1) / kOthers));
    rank_slots<<<pairs, kThreads, 0, stream>>>(order.vocab_ids, slots, order.places);
    require_cuda(cudaGetLastError(), "order of the targets");
  } else {
    const auto vocab = static_cast<std::int32_t>(bound);
    const std::int32_t length = vocab + 2;
    std::int32_t* const next = order.counts + length;
    require_cuda(cudaMemsetAsync(order.counts, 0, static_cast<std::size_t>(length) * 4, stream),
                 "counts of the targets");
    count_vocab<<<blocks_of(count), kThreads, 0, stream>>>(order.vocab_ids, slots, vocab,
                                                           order.counts);
    sum_counts<<<1, kScanThreads, 0, stream>>>(order.counts, length, next);
    scatter_slots<<<blocks_of(count), kThreads, 0, stream>>>(order.vocab_ids, slots, vocab, next,
                                                             order.slots);
    rank_equals<<<blocks_of(count), kThreads, 0, stream>>>(order.vocab_ids, slots, vocab,
                                                           order.counts, order.slots, order.places);
    require_cuda(cudaGetLastError(), "order of the targets");
  }
  place_slots<<<blocks_of(count), kThreads, 0, stream>>>(order.places, slots, order.slots);
  require_cuda(cudaGetLastError(), "order of the targets");
}

void list_targets(const BlockCall& b, const TargetOrder& order, const TargetEntries& entries) {
  const ForwardShape& s = b.chunk.shape;
  const auto count = static_cast<std::int32_t>(s.tokens * s.targets_per_token);
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(b.chunk.stream);
  const std::int64_t threads = std::max<std::int64_t>(count, b.vocab_count + 1);
  if (count <= kOneBlock) {
    const std::int64_t blocks = (threads + kOneBlock - 1) / kOneBlock;
    const bool sums = entries.many != nullptr && count > kFewEntries;
    const std::int64_t parts = sums ? many_rows(count) * ((s.dim + kOneBlock - 1) / kOneBlock) : 0;
    with_type(s.dtype, [&](auto type) {
      list_few<decltype(type)><<<static_cast<unsigned>(blocks + parts), kOneBlock, 0, stream>>>(
          b, order, count, entries, static_cast<int>(blocks));
    });
    return require_cuda(cudaGetLastError(), "entries of the targets");
  }
  write_entries<<<blocks_of(threads), kThreads, 0, stream>>>(b, order, count, entries);
  require_cuda(cudaGetLastError(), "entries of the targets");
  if (entries.many == nullptr) return;
  GradientGemmsCall sums;
  const ListedRows hidden = rows_of_entries(b.chunk);
  sums.tokens = s.tokens;
  sums.targets_per_token = s.targets_per_token;
  sums.dim = s.dim;
  sums.dtype = s.dtype;
  sums.hidden = hidden.data;
  sums.hidden_stride = hidden.stride;
  sums.vocab_begin = static_cast<std::int32_t>(b.vocab_begin);
  sums.block_vocab = b.vocab_count;
  sums.entries = entries;
  sums.stream = b.chunk.stream;
  sum_many_entries(sums);
}

void add_weight_targets(const GradientGemmsCall& c) {
  const dim3 grid(static_cast<unsigned>(std::min(c.tokens * c.targets_per_token, kEntryBlocks)),
                  blocks_of(c.dim));
  with_type(c.dtype, [&](auto type) {
    add_entries<decltype(type)><<<grid, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(c);
  });
  require_cuda(cudaGetLastError(), "targets of d_weight");
}

void sum_many_entries(const GradientGemmsCall& c) {
  if (c.tokens * c.targets_per_token <= kFewEntries) return;
  const dim3 grid(static_cast<unsigned>(many_rows(c.tokens * c.targets_per_token)),
                  blocks_of(c.dim));
  with_type(c.dtype, [&](auto type) {
    sum_vocab<decltype(type)><<<grid, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(c);
  });
  require_cuda(cudaGetLastError(), "targets of frequent vocabulary entries");
}

void add_bias_targets(const TargetEntries& entries, std::int64_t vocab_count, float* d_bias,
                      Stream stream) {
  add_coefficients<<<blocks_of(vocab_count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      entries, vocab_count, d_bias);
  require_cuda(cudaGetLastError(), "targets of d_bias");
}

}  // namespace logitless::cuda

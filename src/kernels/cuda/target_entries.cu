// A chunk's targets in the order of their words.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/targets.cuh"
#include "kernels/device_gradient.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(std::int64_t count) {
  return static_cast<unsigned>(std::max<std::int64_t>(1, (count + kThreads - 1) / kThreads));
}

__global__ void __launch_bounds__(kThreads) read_words(const ForwardCall c, std::int32_t* words) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= c.shape.tokens * c.shape.targets_per_token) return;
  const std::int64_t word = target_of(c, slot);
  words[slot] = is_word(c, word) ? static_cast<std::int32_t>(word) : kNoWord;
}

constexpr std::int32_t kOthers = 512;  // compared by one block of threads

// places [count], 0 before: the number of slots that come before each.
__global__ void __launch_bounds__(kThreads)
    rank_slots(const std::int32_t* words, std::int32_t count, std::int32_t* places) {
  __shared__ std::int32_t others[kOthers];
  const auto first = static_cast<std::int32_t>(blockIdx.y) * kOthers;
  const std::int32_t length = min(kOthers, count - first);
  for (std::int32_t i = threadIdx.x; i < length; i += kThreads) others[i] = words[first + i];
  __syncthreads();
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (slot >= count) return;
  const std::int32_t word = words[slot];
  std::int32_t before = 0;
#pragma unroll 8
  for (std::int32_t i = 0; i < length; ++i)
    before += others[i] < word || (others[i] == word && first + i < slot) ? 1 : 0;
  atomicAdd(places + slot, before);  // of integers: in any order
}

__global__ void __launch_bounds__(kThreads)
    place_slots(const std::int32_t* places, std::int32_t count, std::int32_t* slots) {
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (slot < count) slots[places[slot]] = slot;
}

// begin [words + 1]: where a word would stand in the order; and the entries in it.
__global__ void __launch_bounds__(kThreads)
    write_entries(const BlockCall b, const TargetOrder order, std::int32_t count,
                  const TargetEntries entries) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at <= b.words) {
    const std::int64_t word = b.first_word + at;
    std::int32_t low = 0;
    std::int32_t high = count;
    while (low < high) {
      const std::int32_t middle = (low + high) / 2;
      if (order.words[order.slots[middle]] < word) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    entries.begin[at] = low;
  }
  if (at < count) {
    const std::int32_t slot = order.slots[at];
    entries.words[at] = order.words[slot];
    entries.tokens[at] = slot / b.chunk.shape.targets_per_token;
    entries.coefficients[at] = b.coefficient[slot];
  }
}

__global__ void __launch_bounds__(kThreads)
    add_coefficients(const TargetEntries entries, std::int64_t words, float* d_bias) {
  const std::int64_t word = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (word >= words) return;
  const std::int32_t begin = entries.begin[word];
  const std::int32_t end = entries.begin[word + 1];
  if (begin == end) return;
  double sum = 0.0;
  for (std::int32_t e = begin; e < end; ++e) sum += static_cast<double>(entries.coefficients[e]);
  d_bias[word] += static_cast<float>(sum);
}

}  // namespace

void order_targets(const ForwardCall& c, const TargetOrder& order) {
  const std::int64_t count = c.shape.tokens * c.shape.targets_per_token;
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  read_words<<<blocks_of(count), kThreads, 0, stream>>>(c, order.words);
  require_cuda(cudaGetLastError(), "words of the targets");
  require_cuda(cudaMemsetAsync(order.places, 0, static_cast<std::size_t>(count) * 4, stream),
               "order of the targets");
  const dim3 pairs(blocks_of(count), static_cast<unsigned>((count + kOthers - 1) / kOthers));
  const auto slots = static_cast<std::int32_t>(count);
  rank_slots<<<pairs, kThreads, 0, stream>>>(order.words, slots, order.places);
  require_cuda(cudaGetLastError(), "order of the targets");
  place_slots<<<blocks_of(count), kThreads, 0, stream>>>(order.places, slots, order.slots);
  require_cuda(cudaGetLastError(), "order of the targets");
}

void list_targets(const BlockCall& b, const TargetOrder& order, const TargetEntries& entries) {
  const std::int64_t count = b.chunk.shape.tokens * b.chunk.shape.targets_per_token;
  if (count == 0) return;
  write_entries<<<blocks_of(std::max(count, b.words + 1)), kThreads, 0,
                  static_cast<cudaStream_t>(b.chunk.stream)>>>(
      b, order, static_cast<std::int32_t>(count), entries);
  require_cuda(cudaGetLastError(), "entries of the targets");
}

void add_bias_targets(const TargetEntries& entries, std::int64_t words, float* d_bias,
                      Stream stream) {
  add_coefficients<<<blocks_of(words), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      entries, words, d_bias);
  require_cuda(cudaGetLastError(), "targets of d_bias");
}

}  // namespace logitless::cuda

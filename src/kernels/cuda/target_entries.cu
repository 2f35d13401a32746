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

// The place of a slot is the number of slots before it.
__global__ void __launch_bounds__(kThreads)
    rank_slots(const std::int32_t* words, std::int32_t count, std::int32_t* slots) {
  __shared__ std::int32_t others[kThreads];
  const auto slot = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const std::int32_t word = slot < count ? words[slot] : 0;
  std::int32_t place = 0;
  for (std::int32_t first = 0; first < count; first += kThreads) {
    __syncthreads();
    const auto mine = first + static_cast<std::int32_t>(threadIdx.x);
    others[threadIdx.x] = mine < count ? words[mine] : kNoWord;
    __syncthreads();
    const std::int32_t length = min(kThreads, count - first);
#pragma unroll 8
    for (std::int32_t i = 0; i < length; ++i) {
      const std::int32_t other = others[i];
      place += other < word || (other == word && first + i < slot) ? 1 : 0;
    }
  }
  if (slot < count) slots[place] = slot;
}

// Place p is the first of all words after the one before it and up to its own.
__global__ void __launch_bounds__(kThreads)
    write_entries(const BlockCall b, const TargetOrder order, std::int32_t count,
                  const TargetEntries entries) {
  const auto place = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (place > count) return;
  const std::int64_t end = b.first_word + b.words;
  const auto word_at = [&](std::int32_t p) -> std::int64_t {
    return p < count ? order.words[order.slots[p]] : std::int64_t{kNoWord};
  };
  const std::int64_t after =
      place == 0 ? b.first_word : max(word_at(place - 1) + 1, b.first_word);
  const std::int64_t upto = min(word_at(place), end);
  for (std::int64_t word = after; word <= upto; ++word) entries.begin[word - b.first_word] = place;
  if (place == count) return;
  const std::int32_t slot = order.slots[place];
  entries.tokens[place] = slot / b.chunk.shape.targets_per_token;
  entries.coefficients[place] = b.coefficient[slot];
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
  rank_slots<<<blocks_of(count), kThreads, 0, stream>>>(
      order.words, static_cast<std::int32_t>(count), order.slots);
  require_cuda(cudaGetLastError(), "order of the targets");
}

void list_targets(const BlockCall& b, const TargetOrder& order, const TargetEntries& entries) {
  const std::int64_t count = b.chunk.shape.tokens * b.chunk.shape.targets_per_token;
  if (count == 0) return;
  write_entries<<<blocks_of(count + 1), kThreads, 0, static_cast<cudaStream_t>(b.chunk.stream)>>>(
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

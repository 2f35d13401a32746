// The list of tokens with a target, and rows of hidden states and gradients in its order.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/token_list.h"

namespace logitless::cuda {
namespace {

constexpr int kListThreads = static_cast<int>(kListedTokens);
constexpr int kWarps = kListThreads / 32;
constexpr int kCopyThreads = 128;
constexpr int kScatterThreads = 256;
constexpr int kSpreadThreads = 1024;
constexpr int kSpreadBytes = 64;  // of a row, for each thread block
constexpr int kSpreadEach = 4;    // rows that a thread holds at once

__device__ bool is_listed(const ForwardCall& c, std::int64_t token) {
  return token < c.shape.tokens && has_target(c, token);
}

__global__ void __launch_bounds__(kListThreads)
    count_tokens(const ForwardCall c, std::int32_t* counts) {
  const std::int64_t token = blockIdx.x * kListedTokens + threadIdx.x;
  const int count = __syncthreads_count(is_listed(c, token));
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// Each thread block counts all tokens of so few blocks itself, which takes less time than a launch.
constexpr int kFewBlocks = 8;

// Sums a value over the threads of a block.
__device__ int block_total(int value) {
  __shared__ int of_warps[kWarps];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  int total = 0;
  for (const int of_warp : of_warps) total += of_warp;
  __syncthreads();  // the memory is used again
  return total;
}

__global__ void __launch_bounds__(kListThreads)
    write_list(const ForwardCall c, const TokenList list, int blocks) {
  __shared__ int of_warps[kWarps];
  int earlier = 0, others = 0;
  const auto add = [&](int block, int count) {
    (block < static_cast<int>(blockIdx.x) ? earlier : others) += count;
  };
  if (blocks > kFewBlocks) {
    for (int b = static_cast<int>(threadIdx.x); b < blocks; b += kListThreads)
      add(b, list.counts[b]);
  } else {
    for (int b = 0; b < blocks; ++b)
      add(b, is_listed(c, b * kListedTokens + static_cast<int>(threadIdx.x)));
  }
  earlier = block_total(earlier);
  const int total = earlier + block_total(others);
  const std::int64_t token = blockIdx.x * kListedTokens + threadIdx.x;
  const bool listed = is_listed(c, token);
  const unsigned of_warp = __ballot_sync(~0u, listed);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = __popc(of_warp);
  __syncthreads();
  std::int64_t before = earlier + __popc(of_warp & ((1u << threadIdx.x % 32) - 1));
  for (unsigned w = 0; w < threadIdx.x / 32; ++w) before += of_warps[w];
  if (token < c.shape.tokens)
    list.rows[listed ? before : total + token - before] = static_cast<std::int32_t>(token);
  if (token == 0) list.counts[blocks] = total;
}

// Elements of 2 bytes; 16 bytes at a time where all rows are aligned to that. A thread block for
// each token.
__global__ void __launch_bounds__(kCopyThreads)
    gather_rows(const ListedRows from, std::int64_t first, const std::int32_t* counted,
                std::int64_t count, std::uint16_t* to, bool aligned) {
  const std::int64_t row = blockIdx.x;
  const bool there = counted == nullptr || first + row < *counted;
  const auto* const x = static_cast<const std::uint16_t*>(from.data) + from.rows[row] * from.stride;
  to += row * count;
  if (aligned) {
    for (std::int64_t k = threadIdx.x * 8; k < count; k += kCopyThreads * 8)
      *reinterpret_cast<uint4*>(to + k) =
          there ? *reinterpret_cast<const uint4*>(x + k) : uint4{0, 0, 0, 0};
    return;
  }
  for (std::int64_t k = threadIdx.x; k < count; k += kCopyThreads)
    to[k] = there ? x[k] : std::uint16_t{0};
}

// Spreads columns [blockIdx.x * kSpreadBytes, ...) of the rows, in units of Unit. Each row moves
// down or stays, so the last ones move first. A run of rows is read before any of it is written. No
// write reaches rows before the run, which are read later.
template <typename Unit>
__global__ void __launch_bounds__(kSpreadThreads)
    spread(const TokenList list, int tokens, int blocks, Unit* data, std::int64_t stride,
           std::int64_t units) {
  constexpr int kUnits = kSpreadBytes / static_cast<int>(sizeof(Unit));
  constexpr int kRows = kSpreadThreads / kUnits;
  constexpr int kRun = kRows * kSpreadEach;
  const int counted = list.counts[blocks];
  if (counted == tokens) return;
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kUnits + threadIdx.x % kUnits;
  const bool there = unit < units;
  const int mine = static_cast<int>(threadIdx.x) / kUnits;
  for (int first = (counted + kRun - 1) / kRun * kRun - kRun; first >= 0; first -= kRun) {
    Unit held[kSpreadEach];
    int row[kSpreadEach];
#pragma unroll
    for (int i = 0; i < kSpreadEach; ++i) {
      row[i] = first + i * kRows + mine;
      if (there && row[i] < counted) held[i] = data[row[i] * stride + unit];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSpreadEach; ++i) {
      if (there && row[i] < counted) data[list.rows[row[i]] * stride + unit] = held[i];
    }
  }
  if (!there) return;
  for (int row = counted + mine; row < tokens; row += kRows)
    data[list.rows[row] * stride + unit] = Unit{};
}

__global__ void __launch_bounds__(kScatterThreads)
    scatter_rows(const ForwardCall c, const ForwardCall all) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kScatterThreads + threadIdx.x;
  if (row >= c.shape.tokens) return;
  const std::int64_t token = token_of(c, row);
  if (all.lse != nullptr) all.lse[token] = c.lse[row];
  if (all.entropy != nullptr) all.entropy[token] = c.entropy[row];
  if (all.weighted_sum != nullptr) all.weighted_sum[token] = c.weighted_sum[row];
  if (all.argmax != nullptr) all.argmax[token] = c.argmax[row];
  const int per_token = c.shape.targets_per_token;
  for (int k = 0; k < per_token; ++k) {
    const std::int64_t from = row * per_token + k;
    const std::int64_t to = token * per_token + k;
    if (all.log_prob != nullptr) all.log_prob[to] = c.log_prob[from];
    if (all.target_logit != nullptr) all.target_logit[to] = c.target_logit[from];
  }
}

}  // namespace

void list_tokens(const ForwardCall& all, const TokenList& list) {
  const auto blocks = static_cast<int>(list_blocks(all.shape.tokens));
  if (blocks == 0) return;
  const auto stream = static_cast<cudaStream_t>(all.stream);
  if (blocks > kFewBlocks) {
    count_tokens<<<blocks, kListThreads, 0, stream>>>(all, list.counts);
    require_cuda(cudaGetLastError(), "number of tokens with a target");
  }
  write_list<<<blocks, kListThreads, 0, stream>>>(all, list, blocks);
  require_cuda(cudaGetLastError(), "list of tokens with a target");
}

void gather_listed(const ForwardCall& c, const std::int32_t* counted, void* to) {
  if (c.shape.tokens == 0) return;
  const auto each = static_cast<std::int64_t>(size_of(c.shape.dtype)) / 2;
  const std::int64_t count = c.shape.dim * each;
  ListedRows from = c.original;
  from.stride *= each;
  const auto starts =
      reinterpret_cast<std::uintptr_t>(from.data) | reinterpret_cast<std::uintptr_t>(to);
  const bool aligned = count % 8 == 0 && from.stride % 8 == 0 && starts % 16 == 0;
  gather_rows<<<static_cast<unsigned>(c.shape.tokens), kCopyThreads, 0,
                static_cast<cudaStream_t>(c.stream)>>>(from, c.first_token, counted, count,
                                                       static_cast<std::uint16_t*>(to), aligned);
  require_cuda(cudaGetLastError(), "hidden states of listed tokens");
}

void scatter_outputs(const ForwardCall& c, const ForwardCall& all) {
  const bool wanted = all.lse != nullptr || all.entropy != nullptr || all.weighted_sum != nullptr ||
                      all.argmax != nullptr || all.log_prob != nullptr ||
                      all.target_logit != nullptr;
  if (c.shape.tokens == 0 || !wanted) return;
  scatter_rows<<<static_cast<unsigned>((c.shape.tokens + kScatterThreads - 1) / kScatterThreads),
                 kScatterThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(c, all);
  require_cuda(cudaGetLastError(), "outputs by token");
}

void spread_rows(const TokenList& list, std::int64_t tokens, std::int64_t columns,
                 const GradientOutput& out, Stream stream) {
  if (tokens == 0 || columns == 0) return;
  const auto blocks = static_cast<int>(list_blocks(tokens));
  const auto element = static_cast<std::int64_t>(size_of(out.dtype));
  const auto thread_blocks =
      static_cast<unsigned>((columns * element + kSpreadBytes - 1) / kSpreadBytes);
  const auto launch = [&](auto unit) {
    using Unit = decltype(unit);
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(Unit));
    spread<<<thread_blocks, kSpreadThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        list, static_cast<int>(tokens), blocks, static_cast<Unit*>(out.data),
        out.stride * element / kSize, columns * element / kSize);
  };
  const bool aligned = reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0 &&
                       out.stride * element % 16 == 0 && columns * element % 16 == 0;
  if (aligned) {
    launch(uint4{});
  } else if (element == 2) {
    launch(std::uint16_t{});
  } else {
    launch(std::uint32_t{});
  }
  require_cuda(cudaGetLastError(), "rows of listed tokens");
}

}  // namespace logitless::cuda

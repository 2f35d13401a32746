// Sorts a chunk's tokens by the tiles that they select. A block selects the union of its tokens'
// tiles, so blocks of similar tokens select fewest. Tokens are similar if their last tile is in the
// same part of the order: rare entries are at its end, and most tokens need none. Among those, the
// mean position of their tiles counts.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/far/selection.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/far.h"

namespace logitless::cuda {
namespace {

constexpr int kRows = 32;
constexpr int kParts = 32;
constexpr int kMoveThreads = 1024;

// Parts of the order that distinguish last tiles, and mean positions of tiles within each.
constexpr std::int32_t kClasses = 64;
constexpr std::int32_t kPositions = 1024;
constexpr std::int32_t kKeys = kClasses * kPositions;
static_assert(kKeys == chunk_keys(0));

// A thread block for each 32 tokens.
__global__ void __launch_bounds__(kRows* kParts)
    key_tokens(const ForwardCall c, const SelectArguments a, std::int32_t* keys) {
  struct Part {
    int count, last;
    std::int64_t sum;
  };
  __shared__ Part parts[kParts][kRows];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x;
  const float least = least_mass(a, row);
  Part mine{0, -1, 0};
  if (least < INFINITY) {
    for (int tile = threadIdx.y; tile < a.tiles; tile += kParts) {
      if (!(mass_of(a, tile, row) > least)) continue;
      ++mine.count;
      mine.last = tile;
      mine.sum += tile;
    }
  }
  parts[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y > 0 || row >= a.tokens) return;
  for (int p = 1; p < kParts; ++p) {
    const Part& other = parts[p][threadIdx.x];
    mine.count += other.count;
    mine.last = max(mine.last, other.last);
    mine.sum += other.sum;
  }
  // All others have unique keys, since many equal ones are slow to sort. Tokens with a NaN total
  // come with the ignored ones, so that they do not change the others' blocks.
  auto key = static_cast<std::int32_t>(kKeys + row);
  if (!has_target(c, row) || isnan(a.rows == nullptr ? a.total[row] : a.rows[row].lse_log2)) {
    key += static_cast<std::int32_t>(a.tokens);
  } else if (mine.count > 0) {
    const std::int64_t place =
        mine.sum * kPositions / (static_cast<std::int64_t>(mine.count) * a.tiles);
    key = static_cast<std::int32_t>(std::int64_t{mine.last} * kClasses / a.tiles * kPositions +
                                    place);
  }
  keys[row] = key;
}

// A thread block permutes each vector through shared memory.
__global__ void __launch_bounds__(kMoveThreads)
    move_values(const TokenValues v, const std::int32_t* from, int tokens) {
  extern __shared__ std::uint32_t values[];
  auto* const base = static_cast<std::uint32_t*>(v.data) + blockIdx.x * v.vector_stride;
  for (int i = threadIdx.x; i < tokens; i += kMoveThreads) values[i] = base[i * v.stride];
  __syncthreads();
  for (int i = threadIdx.x; i < tokens; i += kMoveThreads) base[i * v.stride] = values[from[i]];
}

}  // namespace

void sort_tokens(const ForwardCall& c, const RowCoefficients* rows,
                 std::span<const TokenValues> values) {
  const FarCall& far = *c.far;
  const FarTokens& t = far.tokens;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  SelectArguments a = select_arguments(c);
  a.rows = rows;
  key_tokens<<<static_cast<unsigned>((a.tokens + kRows - 1) / kRows), dim3(kRows, kParts), 0,
               stream>>>(c, a, t.order.vocab_ids);
  require_cuda(cudaGetLastError(), "keys of the tokens");
  order_keys(t.order, a.tokens, chunk_keys(a.tokens), c.stream);
  const auto bytes = static_cast<std::size_t>(a.tokens) * sizeof(std::uint32_t);
  require_cuda(cudaFuncSetAttribute(move_values, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kMostFarTokens * sizeof(std::uint32_t))),
               "shared memory");
  const auto move = [&](const TokenValues& v) {
    move_values<<<static_cast<unsigned>(v.vectors), kMoveThreads, bytes, stream>>>(
        v, t.order.slots, static_cast<int>(a.tokens));
    require_cuda(cudaGetLastError(), "tokens by the tiles they keep");
  };
  move({far.mass, a.tiles, a.padded_tokens, 1});
  move({c.reference, 1, 0, 1});
  move({t.rows + c.first_token, 1, 0, 1});
  for (const TokenValues& v : values) move(v);
  gather_tokens(c, t.hidden, t.hidden_stride, t.hidden_rows);
}

}  // namespace logitless::cuda

// The best entries of tokens from stored logits, see device/sample.h.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/kept_entries.cuh"
#include "kernels/cuda/head/sample_sizes.h"
#include "kernels/device/sample.h"

namespace logitless::cuda {
namespace {

static_assert(kMostBestEntries == kMostListed);

struct BestArguments {
  StoredRows rows;
  std::int64_t first_token;
  int k;
  const void* targets;  // [all tokens], or null
  bool int64_targets;
  std::int64_t* wanted;  // [all tokens, k], or with targets [all tokens, k + 1]

  __device__ std::int64_t target_of(std::int64_t token) const {
    return int64_targets ? static_cast<const std::int64_t*>(targets)[token]
                         : static_cast<const std::int32_t*>(targets)[token];
  }
};

// Writes the ids of the k greatest logits in ascending order, and the target. A thread block for
// each token.
template <bool kGeneral>
__global__ void __launch_bounds__(kSelectThreads, 2) find_best(const BestArguments b) {
  __shared__ Selection m;
  const std::int64_t row = blockIdx.x, token = b.first_token + row;
  RowEntries<kGeneral> entries{b.rows, row};
  entries.least = least_of_best<kGeneral>(b.rows, row, span_of(b.rows, row, m), b.k, m);
  RowPart part;
  m.list_part(entries, part);
  // The low half of an entry falls where its id rises.
  for (int i = static_cast<int>(threadIdx.x); i < m.listed; i += kSelectThreads)
    m.list[i] &= 0xFFFFFFFF;
  __syncthreads();
  m.sort_list();
  std::int64_t* const to = b.wanted + token * (b.targets == nullptr ? b.k : b.k + 1);
  for (int i = static_cast<int>(threadIdx.x); i < b.k; i += kSelectThreads)
    to[i] = i < m.listed ? vocab_id_of(m.list[i]) : 0;
  if (b.targets != nullptr && threadIdx.x == 0) to[b.k] = b.target_of(token);
}

}  // namespace

void best_entries(const BestCall& b) {
  if (b.chunk.shape.tokens == 0) return;
  const SampleLayout layout(*b.kernel, b.chunk.shape);
  auto* const base = static_cast<std::byte*>(b.chunk.workspace);
  auto* const logits = reinterpret_cast<float*>(base + layout.logits);
  ForwardCall c = b.chunk;
  c.targets = b.wanted;
  c.int64_targets = true;
  c.bad_target = reinterpret_cast<std::uint64_t*>(base + layout.bad_target);
  auto* const tops = reinterpret_cast<float*>(base + layout.tile_tops);
  b.kernel->stored->store(c, nullptr, logits, tops);
  BestArguments a{};
  a.rows = stored_rows(c, tops, logits, nullptr);
  a.first_token = c.first_token;
  a.k = static_cast<int>(b.k);
  a.targets = b.targets;
  a.int64_targets = b.int64_targets;
  a.wanted = b.wanted;
  (a.rows.general() ? find_best<true>
                    : find_best<false>)<<<static_cast<unsigned>(c.shape.tokens), kSelectThreads, 0,
                                          static_cast<cudaStream_t>(c.stream)>>>(a);
  require_cuda(cudaGetLastError(), "best entries");
  c.block.data = logits;
  b.kernel->stored->forward(c);
}

}  // namespace logitless::cuda

// Selects vocabulary tiles for each block of tokens: by masses, estimates, targets and the sample.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/far/selection.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/far.h"
#include "math/lse_state.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// A thread block for each 256 tokens and 32 groups, a thread for each token.
__global__ void __launch_bounds__(kFarBlock) mark_groups(const SelectArguments a) {
  const std::int64_t token = blockIdx.x * kFarBlock + threadIdx.x;
  const float least = least_mass(a, token);
  std::uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) {
    const int group = static_cast<int>(blockIdx.y) * 32 + i;
    if (group >= a.groups) break;
    float most = mass_of(a, 2 * group, token);
    if (2 * group + 1 < a.tiles) most = fmaxf(most, mass_of(a, 2 * group + 1, token));
    bits |= __syncthreads_or(most > least) != 0 ? 1u << i : 0u;
  }
  if (threadIdx.x == 0) a.block_groups[blockIdx.x * gridDim.y + blockIdx.y] = bits;
}

constexpr int kListThreads = 1024;

// Inclusive prefix sum over the threads of a block.
__device__ int scan_counts(int mine) {
  __shared__ int counts[kListThreads];
  __syncthreads();
  counts[threadIdx.x] = mine;
  __syncthreads();
  for (int step = 1; step < kListThreads; step *= 2) {
    const int before = static_cast<int>(threadIdx.x) >= step ? counts[threadIdx.x - step] : 0;
    __syncthreads();
    counts[threadIdx.x] += before;
    __syncthreads();
  }
  return counts[threadIdx.x];
}

// Partitions the groups stably: selected ones first. One thread block. whole: the last group is
// full.
__global__ void __launch_bounds__(kListThreads)
    order_groups(const SelectArguments a, bool as_they_are, bool whole) {
  const int run = (a.groups + kListThreads - 1) / kListThreads;
  const int begin = min(a.groups, static_cast<int>(threadIdx.x) * run);
  const int end = min(a.groups, begin + run);
  const auto selected = [&](int group) {
    if (as_they_are || (!whole && group == a.groups - 1)) return false;
    for (int b = 0; b < a.blocks; ++b)
      if (a.active[b] != 0 && has_bit(a.block_groups + b * a.group_bits, group)) return true;
    return false;
  };
  int count = 0;
  for (int group = begin; group < end; ++group) count += selected(group) ? 1 : 0;
  __shared__ int all;
  const int until = scan_counts(count);
  if (threadIdx.x == kListThreads - 1) all = until;
  __syncthreads();
  int place = until - count, rest = all + begin - place;
  for (int group = begin; group < end; ++group) a.order[selected(group) ? place++ : rest++] = group;
}

// Permutes the bits of a block of tokens to arranged positions; a thread block for each.
__global__ void __launch_bounds__(kThreads) arrange_bits(const SelectArguments a) {
  extern __shared__ std::uint32_t bits[];
  std::uint32_t* const own = a.block_groups + blockIdx.x * a.group_bits;
  for (int w = static_cast<int>(threadIdx.x); w < a.group_bits; w += kThreads) bits[w] = own[w];
  __syncthreads();
  for (int place = static_cast<int>(threadIdx.x); place < a.group_bits * 32; place += kThreads) {
    const bool selected = place < a.groups && has_bit(bits, a.order[place]);
    const std::uint32_t ballot = __ballot_sync(~0u, selected);
    if (place % 32 == 0) own[place / 32] = ballot;
  }
}

// A thread block for each arranged group, a thread for each vocabulary entry.
__global__ void __launch_bounds__(kFarGroup)
    arrange_vocab(const DeviceOrder order, const FarArrangement to, std::int64_t vocab) {
  const std::int64_t from = to.groups[blockIdx.x] * kFarGroup + threadIdx.x;
  const std::int64_t place = blockIdx.x * kFarGroup + threadIdx.x;
  if (from >= vocab) return;
  const std::int32_t vocab_id = order.vocab_ids[from];
  to.vocab_ids[place] = vocab_id;
  to.share[place] = order.share[from];
  to.positions[vocab_id] = static_cast<std::int32_t>(place);
}

// A thread block for each arranged tile; dim is a multiple of 8.
__global__ void __launch_bounds__(kThreads)
    arrange_centroids(const void* from, const FarArrangement to, std::int64_t dim) {
  const std::int64_t tile = 2 * to.groups[blockIdx.x / 2] + blockIdx.x % 2;
  const auto* const row = static_cast<const uint4*>(from) + tile * dim / 8;
  auto* const put = static_cast<uint4*>(to.centroid) + blockIdx.x * dim / 8;
  for (std::int64_t i = threadIdx.x; i < dim / 8; i += kThreads) put[i] = row[i];
}

__device__ __forceinline__ bool keeps(const SelectArguments& a, int block, int group) {
  return has_bit(a.block_groups + block * a.group_bits, group);
}

__device__ std::int64_t list_sum(std::int64_t mine) {
  __shared__ std::int64_t parts[kListThreads];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kListThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  return parts[0];
}

// One thread block: selects all pairs where too many are selected, transposes the bits including
// the sample, and writes the list.
__global__ void __launch_bounds__(kListThreads) list_groups(const SelectArguments a) {
  const int words = a.group_bits;
  const int block_words = a.block_bits;
  std::int64_t mine = 0;
  for (int i = threadIdx.x; i < a.blocks * words; i += kListThreads)
    mine += __popc(a.block_groups[i]);
  std::int64_t selected = list_sum(mine);
  __syncthreads();
  std::int64_t mine_active = 0;
  for (int b = threadIdx.x; b < a.blocks; b += kListThreads) mine_active += a.active[b] != 0;
  const std::int64_t pairs = a.groups * list_sum(mine_active);
  const bool all =
      !a.chosen && static_cast<float>(selected) > a.most_selected * static_cast<float>(pairs);
  if (all) {
    selected = pairs;
    __syncthreads();
    for (int i = threadIdx.x; i < a.blocks * words; i += kListThreads) {
      if (a.active[i / words] == 0) continue;
      const int rest = a.groups - i % words * 32;
      a.block_groups[i] = rest >= 32 ? ~0u : (1u << rest) - 1;
    }
  }
  if (threadIdx.x == 0 && !a.chosen) {
    a.sums->selected += selected;
    a.sums->pairs += pairs;
    a.sums->fallback |= all && a.reports_fallback ? 1 : 0;
  }
  __syncthreads();
  // Each thread has a contiguous run of groups, so that the list ascends.
  const int run = (a.groups + kListThreads - 1) / kListThreads;
  const int begin = min(a.groups, static_cast<int>(threadIdx.x) * run);
  const int end = min(a.groups, begin + run);
  int count = 0;
  for (int group = begin; group < end; ++group) {
    const auto sampled = static_cast<int>(a.sample.first_of(a.order[group]));
    const auto every = static_cast<int>(a.sample.every);
    for (int w = 0; w < block_words; ++w) {
      std::uint32_t bits = 0;
      for (int b = w * 32; b < min(a.blocks, w * 32 + 32); ++b)
        if (keeps(a, b, group) || (sampled >= 0 && a.active[b] != 0 && b % every == sampled))
          bits |= 1u << (b % 32);
      a.group_blocks[group * block_words + w] = bits;
      count += __popc(bits);
    }
  }
  const int until = scan_counts(count);
  int at = until - count;
  for (int group = begin; group < end; ++group) {
    a.list_begin[group] = at;
    for (int w = 0; w < block_words; ++w) {
      for (std::uint32_t bits = a.group_blocks[group * block_words + w]; bits != 0;
           bits &= bits - 1) {
        const int block = w * 32 + __ffs(static_cast<int>(bits)) - 1;
        a.list[at++] = far_entry(group, !keeps(a, block, group), block);
      }
    }
  }
  if (threadIdx.x < kListThreads - 1) return;
  a.list_begin[a.groups] = until;
  a.sums->sampled += until - selected;
}

// Also selects tiles in which a target has more than tau. logits [tokens, K].
__global__ void __launch_bounds__(kThreads)
    mark_targets(const ForwardCall c, const DeviceOrder order, const SelectArguments a,
                 const float* logits) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int per_token = c.shape.targets_per_token;
  if (slot >= a.tokens * per_token) return;
  const std::int64_t vocab_id = target_of(c, slot);
  if (!is_local(c, vocab_id)) return;
  const float share = logits[slot] * static_cast<float>(kLog2E) - a.total[slot / per_token];
  if (!(share > log2f(a.tau))) return;
  const int group = order.positions[row_of_vocab_id(c, vocab_id)] / static_cast<int>(kFarGroup);
  atomicOr(a.block_groups + slot / per_token / kFarBlock * a.group_bits + group / 32,
           1u << (group % 32));
}

}  // namespace

SelectArguments select_arguments(const ForwardCall& c) {
  const FarCall& far = *c.far;
  SelectArguments a{};
  a.mass = far.mass;
  a.reference = c.reference;
  a.active = c.active;
  a.order = far.arranged.groups;
  a.block_groups = far.block_groups;
  a.group_blocks = far.group_blocks;
  a.list = far.list;
  a.list_begin = far.list_begin;
  a.sums = far.sums;
  a.tokens = c.shape.tokens;
  a.padded_tokens = padded_tokens(c.shape.tokens);
  a.tiles = static_cast<int>(far_tile_count(c.shape.vocab));
  a.groups = static_cast<int>(far_group_count(c.shape.vocab));
  a.blocks = static_cast<int>(a.padded_tokens / kFarBlock);
  a.group_bits = static_cast<int>(far_bits(a.groups));
  a.block_bits = static_cast<int>(far_bits(a.blocks));
  a.tau = far.tau;
  a.most_selected = far.most_selected;
  a.reports_fallback = far.reports_fallback;
  if (far.estimate != nullptr) {
    a.total = far.estimate->total;
    a.caution = far.estimate->moments.caution;
  }
  return a;
}

namespace {

void mark(const SelectArguments& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.blocks), static_cast<unsigned>(a.group_bits));
  mark_groups<<<grid, kFarBlock, 0, stream>>>(a);
  require_cuda(cudaGetLastError(), "tiles to keep");
}
void arrange(const SelectArguments& a, const ForwardCall& c) {
  const FarCall& far = *c.far;
  const bool as_it_is = far.order.identity;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  order_groups<<<1, kListThreads, 0, stream>>>(a, as_it_is, c.shape.vocab % kFarGroup == 0);
  if (!as_it_is) {
    const std::size_t bits = static_cast<std::size_t>(a.group_bits) * 4;
    arrange_bits<<<static_cast<unsigned>(a.blocks), kThreads, bits, stream>>>(a);
    arrange_vocab<<<static_cast<unsigned>(a.groups), kFarGroup, 0, stream>>>(
        far.order, far.arranged, c.shape.vocab);
    arrange_centroids<<<static_cast<unsigned>(a.tiles), kThreads, 0, stream>>>(
        far.centroid, far.arranged, c.shape.dim);
  }
  require_cuda(cudaGetLastError(), "order of the selected tiles");
}
void list(const SelectArguments& a, cudaStream_t stream) {
  list_groups<<<1, kListThreads, 0, stream>>>(a);
  require_cuda(cudaGetLastError(), "tiles to keep");
}

}  // namespace

void select_tiles(const ForwardCall& c, const RowCoefficients* rows) {
  SelectArguments a = select_arguments(c);
  a.rows = rows;
  a.sample = c.far->sample;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  mark(a, stream);
  arrange(a, c);
  list(a, stream);
}

void select_estimated(const ForwardCall& c, const float* target_logits) {
  const SelectArguments a = select_arguments(c);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  mark(a, stream);
  const auto slots = a.tokens * c.shape.targets_per_token;
  mark_targets<<<static_cast<unsigned>((slots + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      c, c.far->order, a, target_logits);
  require_cuda(cudaGetLastError(), "tiles of the targets");
  arrange(a, c);
  list(a, stream);
}

void sample_tiles(const ForwardCall& c) {
  SelectArguments a = select_arguments(c);
  a.chosen = true;
  a.sample = c.far->sample;
  list(a, static_cast<cudaStream_t>(c.stream));
}

}  // namespace logitless::cuda

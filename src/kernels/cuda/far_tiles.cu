// The far field's tiles of words: rows through the order, tiles as points, which of them are kept.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/far_selection.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/device/targets.cuh"
#include "kernels/cuda/device_kernels.h"
#include "kernels/device_far.h"
#include "math/lse_state.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;     // bf16 of a 16-byte load
constexpr int kColumns = 512;  // of a thread block
constexpr int kRowGroups = kThreads * kVector / kColumns;

struct alignas(16) Vector {
  __nv_bfloat16 values[kVector];
};

struct GatherArguments {
  const std::int32_t* words;  // from the slab's first position on; null: the identity
  const float* share;         // likewise
  const __nv_bfloat16* weight;
  std::int64_t stride;
  __nv_bfloat16* rows;      // null: no copy
  __nv_bfloat16* centroid;  // of the slab's first tile; null: not wanted
  const float* weights;     // of the mean, as share of the centroid
  __nv_bfloat16* mean;      // null: not wanted
  std::int64_t dim;
  int count;  // words of the slab
  const int* wanted;
};

// A thread block for each tile and kColumns columns.
__global__ void __launch_bounds__(kThreads) gather_tile(const GatherArguments a) {
  __shared__ float parts[kRowGroups][kColumns];
  if (a.wanted != nullptr && *a.wanted == 0) return;
  const int group = static_cast<int>(threadIdx.x) * kVector / kColumns;
  const int local = static_cast<int>(threadIdx.x) * kVector % kColumns;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kColumns + local;
  const int first = static_cast<int>(blockIdx.x * kFarTile);
  const int end = min(a.count, first + static_cast<int>(kFarTile));
  float sums[kVector] = {};
  float means[kVector] = {};
  if (column < a.dim) {
#pragma unroll 8
    for (int row = first + group; row < end; row += kRowGroups) {
      const std::int64_t word = a.words == nullptr ? row : a.words[row];
      const Vector v = *reinterpret_cast<const Vector*>(a.weight + word * a.stride + column);
      if (a.rows != nullptr) *reinterpret_cast<Vector*>(a.rows + row * a.dim + column) = v;
      if (a.centroid == nullptr) continue;
      const float share = a.share[row];
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] = fmaf(share, as_float(v.values[i]), sums[i]);
      if (a.mean == nullptr) continue;
      const float weight = a.weights[row];
#pragma unroll
      for (int i = 0; i < kVector; ++i) means[i] = fmaf(weight, as_float(v.values[i]), means[i]);
    }
  }
  if (a.centroid == nullptr) return;
  const auto put = [&](const float(&values)[kVector], __nv_bfloat16* to) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVector; ++i) parts[group][local + i] = values[i];
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < kColumns; c += kThreads) {
      const std::int64_t at = static_cast<std::int64_t>(blockIdx.y) * kColumns + c;
      float sum = 0.0f;
      for (int g = 0; g < kRowGroups; ++g) sum += parts[g][c];
      if (at < a.dim) to[blockIdx.x * a.dim + at] = __float2bfloat16(sum);
    }
  };
  put(sums, a.centroid);
  if (a.mean != nullptr) put(means, a.mean);
}

__device__ float warp_sum(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// A thread block for each tile, a warp for each row in turn. From the weights themselves: they have
// just been read.
__global__ void __launch_bounds__(kThreads)
    measure_tile(const GatherArguments a, float* radius, float* distance) {
  __shared__ float greatest[kThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(blockIdx.x * kFarTile);
  const int end = min(a.count, first + static_cast<int>(kFarTile));
  const __nv_bfloat16* const centroid = a.centroid + blockIdx.x * a.dim;
  float top = 0.0f;
  float norm = 0.0f;
  for (int row = first + warp; row < end; row += kThreads / 32) {
    const std::int64_t word = a.words == nullptr ? row : a.words[row];
    float sum = 0.0f;
    norm = 0.0f;
    for (std::int64_t c = lane * kVector; c < a.dim; c += 32 * kVector) {
      const Vector v = *reinterpret_cast<const Vector*>(a.weight + word * a.stride + c);
      const Vector m = *reinterpret_cast<const Vector*>(centroid + c);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float middle = as_float(m.values[i]);
        const float off = as_float(v.values[i]) - middle;
        sum = fmaf(off, off, sum);
        norm = fmaf(middle, middle, norm);
      }
    }
    const float total = warp_sum(sum);
    top = total > top || isnan(total) ? total : top;
  }
  norm = warp_sum(norm);
  if (lane == 0) greatest[warp] = top;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kThreads / 32; ++w)
    top = greatest[w] > top || isnan(greatest[w]) ? greatest[w] : top;
  radius[blockIdx.x] = sqrtf(top);
  distance[blockIdx.x] = sqrtf(norm);
}

__global__ void __launch_bounds__(kThreads)
    gather_floats(const std::int32_t* words, const float* from, std::int64_t count, float* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = from[words[i]];
}

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

// One thread block: all of them where too many are kept, the transposed bits with the sample, and
// the list.
__global__ void __launch_bounds__(kListThreads) list_groups(const SelectArguments a) {
  __shared__ int counts[kListThreads];
  const int words = a.group_bits;
  const int block_words = a.block_bits;
  std::int64_t mine = 0;
  for (int i = threadIdx.x; i < a.blocks * words; i += kListThreads)
    mine += __popc(a.block_groups[i]);
  std::int64_t kept = list_sum(mine);
  __syncthreads();
  std::int64_t mine_active = 0;
  for (int b = threadIdx.x; b < a.blocks; b += kListThreads) mine_active += a.active[b] != 0;
  const std::int64_t pairs = a.groups * list_sum(mine_active);
  const bool all = !a.chosen && static_cast<float>(kept) > a.most_kept * static_cast<float>(pairs);
  if (all) {
    kept = pairs;
    __syncthreads();
    for (int i = threadIdx.x; i < a.blocks * words; i += kListThreads) {
      if (a.active[i / words] == 0) continue;
      const int rest = a.groups - i % words * 32;
      a.block_groups[i] = rest >= 32 ? ~0u : (1u << rest) - 1;
    }
  }
  if (threadIdx.x == 0 && !a.chosen) {
    if (a.first_chunk) *a.sums = {};
    a.sums->kept += kept;
    a.sums->pairs += pairs;
    a.sums->fallback |= all ? 1 : 0;
  }
  __syncthreads();
  // A run of groups for each thread, so that the list ascends.
  const int run = (a.groups + kListThreads - 1) / kListThreads;
  const int begin = min(a.groups, static_cast<int>(threadIdx.x) * run);
  const int end = min(a.groups, begin + run);
  int count = 0;
  for (int group = begin; group < end; ++group) {
    const auto sampled = static_cast<int>(a.sample.first_of(group));
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
  counts[threadIdx.x] = count;
  __syncthreads();
  for (int step = 1; step < kListThreads; step *= 2) {
    const int before = static_cast<int>(threadIdx.x) >= step ? counts[threadIdx.x - step] : 0;
    __syncthreads();
    counts[threadIdx.x] += before;
    __syncthreads();
  }
  int at = counts[threadIdx.x] - count;
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
  a.list_begin[a.groups] = counts[threadIdx.x];
  a.sums->sampled += counts[threadIdx.x] - kept;
}

}  // namespace

const void* gather_slab(const ForwardCall& c, const FarSlab& slab, GatherPart part,
                        const int* wanted) {
  const FarCall& far = *c.far;
  const auto* const weight = static_cast<const __nv_bfloat16*>(c.weight);
  GatherArguments a{};
  a.dim = c.shape.dim;
  a.count = static_cast<int>(slab.words);
  a.wanted = wanted;
  a.stride = c.weight_stride;
  a.share = far.order.share + slab.first;
  const void* rows = far.gathered;
  if (far.order.identity) {
    rows = a.weight = weight + slab.first * c.weight_stride;
  } else {
    a.weight = weight;
    a.words = far.order.words + slab.first;
    a.rows = static_cast<__nv_bfloat16*>(far.gathered);
  }
  auto* const centroid =
      static_cast<__nv_bfloat16*>(far.centroid) + slab.first / kFarTile * c.shape.dim;
  if (part == GatherPart::centroids) a.centroid = centroid;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const dim3 grid(static_cast<unsigned>(far_tiles(slab.words)),
                  static_cast<unsigned>((c.shape.dim + kColumns - 1) / kColumns));
  if (a.rows != nullptr || a.centroid != nullptr) gather_tile<<<grid, kThreads, 0, stream>>>(a);
  if (part == GatherPart::radii) {
    a.centroid = centroid;
    measure_tile<<<grid.x, kThreads, 0, stream>>>(a, far.radius + slab.first / kFarTile,
                                                  far.distance + slab.first / kFarTile);
  }
  require_cuda(cudaGetLastError(), "rows of the weights by position");
  return rows;
}

void gather_tokens(const ForwardCall& c, const void* hidden, std::int64_t stride, void* to) {
  if (c.shape.tokens == 0) return;
  GatherArguments a{};
  a.words = c.rows + c.first_token;
  a.weight = static_cast<const __nv_bfloat16*>(hidden);
  a.stride = stride;
  a.rows = static_cast<__nv_bfloat16*>(to);
  a.dim = c.shape.dim;
  a.count = static_cast<int>(c.shape.tokens);
  const dim3 grid(static_cast<unsigned>(far_tiles(c.shape.tokens)),
                  static_cast<unsigned>((c.shape.dim + kColumns - 1) / kColumns));
  gather_tile<<<grid, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(a);
  require_cuda(cudaGetLastError(), "hidden states in the tokens' order");
}

void gather_vectors(const ForwardCall& c) {
  const FarCall& far = *c.far;
  const auto blocks = static_cast<unsigned>((c.shape.vocab + kThreads - 1) / kThreads);
  for (const auto& [from, to] : {std::pair{c.bias, far.bias}, {c.omega, far.omega}}) {
    if (from == nullptr || to == nullptr) continue;
    gather_floats<<<blocks, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(
        far.order.words, from, c.shape.vocab, to);
    require_cuda(cudaGetLastError(), "bias and omega by position");
  }
}

namespace {

// Where a target has more than tau. logits [tokens, K].
__global__ void __launch_bounds__(kThreads)
    mark_targets(const ForwardCall c, const DeviceOrder order, const SelectArguments a,
                 const float* logits) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int per_token = c.shape.targets_per_token;
  if (slot >= a.tokens * per_token) return;
  const std::int64_t word = target_of(c, slot);
  if (!is_word(c, word)) return;
  const float share = logits[slot] * static_cast<float>(kLog2E) - a.total[slot / per_token];
  if (!(share > log2f(a.tau))) return;
  const int group = order.positions[word] / static_cast<int>(kFarGroup);
  atomicOr(a.block_groups + slot / per_token / kFarBlock * a.group_bits + group / 32,
           1u << (group % 32));
}

}  // namespace

SelectArguments select_arguments(const ForwardCall& c, bool first_chunk) {
  const FarCall& far = *c.far;
  SelectArguments a{};
  a.mass = far.mass;
  a.reference = c.reference;
  a.active = c.active;
  a.block_groups = far.block_groups;
  a.group_blocks = far.group_blocks;
  a.list = far.list;
  a.list_begin = far.list_begin;
  a.sums = far.sums;
  a.tokens = c.shape.tokens;
  a.padded_tokens = padded_tokens(c.shape.tokens);
  a.tiles = static_cast<int>(far_tiles(c.shape.vocab));
  a.groups = static_cast<int>(far_groups(c.shape.vocab));
  a.blocks = static_cast<int>(a.padded_tokens / kFarBlock);
  a.group_bits = static_cast<int>(far_bits(a.groups));
  a.block_bits = static_cast<int>(far_bits(a.blocks));
  a.tau = far.tau;
  a.most_kept = far.most_kept;
  a.first_chunk = first_chunk;
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
void list(const SelectArguments& a, cudaStream_t stream) {
  list_groups<<<1, kListThreads, 0, stream>>>(a);
  require_cuda(cudaGetLastError(), "tiles to keep");
}

}  // namespace

void select_tiles(const ForwardCall& c, const RowCoefficients* rows, bool first_chunk) {
  SelectArguments a = select_arguments(c, first_chunk);
  a.rows = rows;
  a.sample = c.far->sample;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  mark(a, stream);
  list(a, stream);
}

void select_estimated(const ForwardCall& c, const float* target_logits) {
  const SelectArguments a = select_arguments(c, c.first_token == 0);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  mark(a, stream);
  const auto slots = a.tokens * c.shape.targets_per_token;
  mark_targets<<<static_cast<unsigned>((slots + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      c, c.far->order, a, target_logits);
  require_cuda(cudaGetLastError(), "tiles of the targets");
  list(a, stream);
}

void sample_tiles(const ForwardCall& c) {
  SelectArguments a = select_arguments(c, false);
  a.chosen = true;
  a.sample = c.far->sample;
  list(a, static_cast<cudaStream_t>(c.stream));
}

void gather_points(const ForwardCall& c) {
  const FarCall& far = *c.far;
  GatherArguments a{};
  a.words = far.order.identity ? nullptr : far.order.words;
  a.share = far.order.share;
  a.weight = static_cast<const __nv_bfloat16*>(c.weight);
  a.stride = c.weight_stride;
  a.centroid = static_cast<__nv_bfloat16*>(far.centroid);
  a.weights = far.estimate->word_weight;
  a.mean = static_cast<__nv_bfloat16*>(far.estimate->mean);
  a.dim = c.shape.dim;
  a.count = static_cast<int>(c.shape.vocab);
  const dim3 grid(static_cast<unsigned>(far_tiles(c.shape.vocab)),
                  static_cast<unsigned>((c.shape.dim + kColumns - 1) / kColumns));
  gather_tile<<<grid, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(a);
  require_cuda(cudaGetLastError(), "centroids and means");
}

}  // namespace logitless::cuda

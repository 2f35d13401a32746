// Row kernels of the far field: masses as a block of gradients, targets, bounds, sums.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/far/narrow_type.cuh"
#include "kernels/cuda/far/selection.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "math/lse_state.h"
#include "math/softcap.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 32;  // side of a transposed square
constexpr std::int64_t kChunkPositions = chunk_keys(0);

struct BlockArguments {
  const std::int32_t* groups;  // FarCall::groups
  const float* mass;           // indexed by these
  const float* reference;
  const RowCoefficients* rows;
  const std::uint32_t* block_groups;
  const std::uint32_t* group_blocks;
  float sampled;        // factor of sampled pairs
  void* block;          // in the dtype of hidden
  const float* scales;  // BlockCall's
  std::int64_t stride;
  std::int64_t tokens;
  std::int64_t padded_tokens;
  int tiles;
  int blocks;
  int bits;        // 32-bit words of the groups of a block
  int block_bits;  // 32-bit words of the blocks of a group
};

// Index of a tile in the original order, which indexes masses and radii.
__device__ __forceinline__ std::int64_t own_tile(const BlockArguments& a, int tile) {
  return 2 * static_cast<std::int64_t>(a.groups[tile / 2]) + tile % 2;
}
__device__ __forceinline__ float mass_of(const BlockArguments& a, int tile, std::int64_t token) {
  return a.mass[own_tile(a, tile) * a.padded_tokens + token];
}
__device__ __forceinline__ bool keeps(const BlockArguments& a, std::int64_t token, int group) {
  return has_bit(a.block_groups + token / kFarBlock * a.bits, group);
}
// Returns true if the pair is selected or sampled.
__device__ __forceinline__ bool lists(const BlockArguments& a, std::int64_t token, int group) {
  return has_bit(a.group_blocks + group * a.block_bits, static_cast<int>(token / kFarBlock));
}
// A factor of what the block holds, and its inverse.
__device__ __forceinline__ float scale_of(const BlockArguments& a) {
  return a.scales == nullptr ? 1.0f : a.scales[0];
}
__device__ __forceinline__ float unscale_of(const BlockArguments& a) {
  return a.scales == nullptr ? 1.0f : a.scales[1];
}
// alpha P_iJ = mass_factor * mass.
__device__ __forceinline__ float mass_factor(const BlockArguments& a, std::int64_t token) {
  const RowCoefficients r = a.rows[token];
  return r.alpha == 0.0f ? 0.0f : r.alpha * exp2f(r.less_lse(a.reference[token]));
}
// Factor of a skipped group: that of the sample, or 1.
__device__ __forceinline__ float sample_factor(const BlockArguments& a, std::int64_t token,
                                               int group) {
  return a.sampled != 1.0f && lists(a, token, group) ? a.sampled : 1.0f;
}

// A thread block for each 32 tokens and 32 tiles.
template <typename T>
__global__ void __launch_bounds__(kThreads) transpose_masses(const BlockArguments a) {
  __shared__ float square[kSide][kSide + 1];
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.x) * kSide;
  const int first_tile = static_cast<int>(blockIdx.y) * kSide;
  const int lane = static_cast<int>(threadIdx.x) % kSide;
  for (int row = static_cast<int>(threadIdx.x) / kSide; row < kSide; row += kThreads / kSide) {
    const int tile = first_tile + row;
    const std::int64_t token = first_token + lane;  // below the padded number
    float value = 0.0f;
    if (tile < a.tiles && token < a.tokens && !keeps(a, token, tile / 2)) {
      const float factor = mass_factor(a, token);
      if (factor != 0.0f)
        value = scale_of(a) * factor * mass_of(a, tile, token) * sample_factor(a, token, tile / 2);
    }
    square[row][lane] = value;
  }
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x) / kSide; row < kSide; row += kThreads / kSide) {
    if (first_token + row < a.tokens && first_tile + lane < a.stride)
      static_cast<T*>(a.block)[(first_token + row) * a.stride + first_tile + lane] =
          rounded<T>(square[lane][row]);
  }
}

// A thread for each target. The first target of a token in a tile removes all of the token's
// targets there from the mass.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    remove_targets(const ForwardCall c, const DeviceOrder order, const BlockArguments a) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int per_token = c.shape.targets_per_token;
  if (slot >= a.tokens * per_token) return;
  const std::int64_t token = slot / per_token;
  const std::int64_t vocab_id = target_of(c, slot);
  if (!is_local(c, vocab_id)) return;
  const int tile = order.positions[row_of_vocab_id(c, vocab_id)] / static_cast<int>(kFarTile);
  if (keeps(a, token, tile / 2)) return;
  const float factor = mass_factor(a, token);
  if (factor == 0.0f) return;
  const float mass = mass_of(a, tile, token);
  float taken = 0.0f;  // part of the probability
  for (std::int64_t other = token * per_token; other < (token + 1) * per_token; ++other) {
    const std::int64_t named = target_of(c, other);
    if (!is_local(c, named) || order.positions[row_of_vocab_id(c, named)] / kFarTile != tile)
      continue;
    if (other < slot) return;  // the other target's thread does it
    bool again = false;
    for (std::int64_t before = slot; before < other; ++before)
      again = again || target_of(c, before) == named;
    if (!again) taken += expf(c.log_prob[other]) * softcap_slope(c.target_logit[other], c.softcap);
  }
  const float alpha = a.rows[token].alpha;
  const float left = fmaxf(factor / alpha * mass - taken, 0.0f);
  static_cast<T*>(a.block)[token * a.stride + tile] =
      rounded<T>(scale_of(a) * alpha * left * sample_factor(a, token, tile / 2));
}

BlockArguments arguments(const BlockCall& b, const LogitBlock& block) {
  const ForwardCall& c = b.chunk;
  BlockArguments a{};
  a.groups = c.far->groups;
  a.mass = c.far->mass;
  a.reference = c.reference;
  a.rows = b.rows;
  a.block_groups = c.far->block_groups;
  a.group_blocks = c.far->group_blocks;
  a.sampled = 1.0f;
  a.block = block.data;
  a.scales = b.scales;
  a.stride = block.stride;
  a.tokens = c.shape.tokens;
  a.padded_tokens = padded_tokens(c.shape.tokens);
  a.tiles = static_cast<int>(far_tile_count(c.shape.vocab));
  a.blocks = static_cast<int>(a.padded_tokens / kFarBlock);
  a.bits = static_cast<int>(far_bits(far_group_count(c.shape.vocab)));
  a.block_bits = static_cast<int>(far_bits(a.blocks));
  return a;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    zero_targets(const ForwardCall c, const DeviceOrder order, const BlockArguments a,
                 std::int64_t first, std::int64_t vocab_count) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int per_token = c.shape.targets_per_token;
  if (slot >= a.tokens * per_token) return;
  const std::int64_t vocab_id = target_of(c, slot);
  if (!is_local(c, vocab_id)) return;
  const std::int64_t at = order.positions[row_of_vocab_id(c, vocab_id)] - first;
  if (at < 0 || at >= vocab_count) return;
  if (lists(a, slot / per_token, static_cast<int>((first + at) / kFarGroup)))
    static_cast<T*>(a.block)[slot / per_token * a.stride + at] = rounded<T>(0.0f);
}

constexpr int kWarps = kThreads / 32;
// Twice the largest relative error of a mass in 16 bits, and its largest error below the smallest
// normal number.
template <typename T>
constexpr float kRounding = std::is_same_v<T, __half> ? 0x1p-11f : 0x1p-8f;
template <typename T>
constexpr float kUnderflow = std::is_same_v<T, __half> ? 0x1p-25f : 0.0f;

// A warp for each token.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    bound_rows(const BlockArguments a, const float* radius, const float* distance, float* bound) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= a.tokens) return;
  const T* const sizes = static_cast<const T*>(a.block) + token * a.stride;
  const float least = a.rows[token].alpha == 0.0f ? 0.0f : kUnderflow<T>;
  float sum = 0.0f;
  for (int tile = static_cast<int>(threadIdx.x) % 32; tile < a.tiles; tile += 32) {
    const float size = fabsf(as_float(sizes[tile]));
    const std::int64_t own = own_tile(a, tile);
    if (size != 0.0f)
      sum += size * (radius[own] * (1.0f + kRounding<T>)+distance[own] * kRounding<T>);
    if (least != 0.0f && !keeps(a, token, tile / 2)) sum += least * (radius[own] + distance[own]);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) bound[token] = sum * unscale_of(a);
}

// A thread block for each group, a thread for each of its entries.
template <typename T>
__global__ void __launch_bounds__(kFarGroup)
    sum_bias_vocab(const BlockArguments a, const DeviceOrder order, std::int64_t first,
                   std::int64_t vocab, const float* factor, const float* tile_sum, bool add,
                   float* d_bias) {
  const std::int64_t column = blockIdx.x * kFarGroup + threadIdx.x;
  const std::int64_t position = first + column;
  const int group = static_cast<int>(first / kFarGroup + blockIdx.x);
  double total = 0.0;
  for (int b = 0; b < a.blocks; ++b) {
    const std::int64_t begin = b * kFarBlock;
    if (!lists(a, begin, group)) continue;
    const std::int64_t end = min(a.tokens, begin + kFarBlock);
    float sum = 0.0f;
#pragma unroll 8
    for (std::int64_t i = begin; i < end; ++i)
      sum = fmaf(factor[i], as_float(static_cast<const T*>(a.block)[i * a.stride + column]), sum);
    total += static_cast<double>(sum);
  }
  if (position >= vocab) return;
  total += static_cast<double>(order.share[position]) *
           static_cast<double>(tile_sum[position / kFarTile]);
  float& to = d_bias[order.vocab_ids[position]];
  to = static_cast<float>(add ? static_cast<double>(to) + total : total);
}

// Sums over the threads of a block by a fixed halving tree.
__device__ double block_sum(double mine) {
  __shared__ double parts[kThreads];
  __syncthreads();
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  return parts[0];
}

constexpr int kParts = static_cast<int>(kFarPartials / 2);

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_rows(const ForwardCall c, const T* d_hidden, std::int64_t stride, const float* bound,
             float* bound_output, double* partial) {
  double norms = 0.0;
  double bounds = 0.0;
  for (std::int64_t row = blockIdx.x; row < c.shape.tokens; row += kParts) {
    const bool valid = has_target(c, row);
    if (bound_output != nullptr && threadIdx.x == 0)
      bound_output[token_of(c, row)] = valid ? bound[row] : 0.0f;
    if (!valid) continue;
    float sum = 0.0f;
    for (std::int64_t k = threadIdx.x; d_hidden != nullptr && k < c.shape.dim; k += kThreads) {
      const float v = as_float(d_hidden[row * stride + k]);
      sum = fmaf(v, v, sum);
    }
    norms += static_cast<double>(sum);
    if (threadIdx.x == 0 && bound != nullptr)
      bounds += static_cast<double>(bound[row]) * static_cast<double>(bound[row]);
  }
  const double norm = block_sum(norms);
  const double total = block_sum(bounds);
  if (threadIdx.x > 0) return;
  partial[2 * blockIdx.x] = norm;
  partial[2 * blockIdx.x + 1] = total;
}

__global__ void __launch_bounds__(kParts) add_sums(const double* partial, FarSums* sums) {
  static_assert(kParts == kThreads);
  const double norm = block_sum(partial[2 * threadIdx.x]);
  const double bound = block_sum(partial[2 * threadIdx.x + 1]);
  if (threadIdx.x > 0) return;
  sums->norm_squared += norm;
  sums->bound_squared += bound;
}

// Position of a token's first target; -1 if there is none.
__device__ std::int64_t position_of_token(const ForwardCall& c, const DeviceOrder& order,
                                          std::int64_t row) {
  const std::int64_t vocab_id = target_of(c, row * c.shape.targets_per_token);
  if (order.places != nullptr) return is_target(c, vocab_id) ? order.places[vocab_id] : -1;
  return is_local(c, vocab_id) ? order.positions[row_of_vocab_id(c, vocab_id)] : -1;
}

std::int64_t position_count(const ForwardCall& all, const DeviceOrder& order) {
  return order.places != nullptr ? order.position_count : all.shape.vocab;
}

__global__ void __launch_bounds__(kThreads)
    read_keys(const ForwardCall all, const DeviceOrder order, std::int64_t places,
              std::int32_t* keys) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= all.shape.tokens) return;
  std::int64_t key = places + 1 + token;  // a unique key after all others
  if (has_target(all, token)) key = position_of_token(all, order, token) + 1;
  keys[token] = static_cast<std::int32_t>(key);
}

__global__ void __launch_bounds__(kThreads)
    read_chunk_keys(const ForwardCall c, const DeviceOrder order, std::int32_t* keys) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= c.shape.tokens) return;
  std::int64_t key = kChunkPositions + row;
  if (has_target(c, row))
    key = (position_of_token(c, order, row) + 1) * (kChunkPositions - 1) / order.position_count;
  keys[row] = static_cast<std::int32_t>(key);
}

__global__ void __launch_bounds__(kThreads)
    count_valid(const ForwardCall all, std::int32_t* valid) {
  double mine = 0.0;
  for (std::int64_t t = threadIdx.x; t < all.shape.tokens; t += kThreads)
    mine += has_target(all, t) ? 1.0 : 0.0;
  const double total = block_sum(mine);
  if (threadIdx.x == 0) *valid = static_cast<std::int32_t>(total);
}

__global__ void __launch_bounds__(kThreads) spread_rows(const FarAudit audit) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= audit.tokens) return;
  const std::int64_t valid = *audit.valid;
  const std::int64_t audited = min(audit.tokens, valid);
  audit.rows[i] = audit.order[i < audited ? i * valid / audited : i];
}

// A thread block for each token of the chunk.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const ForwardCall c, const FarAudit audit, const T* d_hidden, std::int64_t stride) {
  const std::int64_t valid = *audit.valid;
  const std::int64_t audited = min(audit.tokens, valid);
  const std::int64_t row = c.first_token + blockIdx.x;
  if (row >= valid) return;
  const std::int64_t to = (row * audited + valid - 1) / valid;  // the first at this row or later
  if (to >= audited || to * valid / audited != row) return;
  if (threadIdx.x == 0 && c.lse != nullptr) audit.lse[to] = c.lse[blockIdx.x];
  for (std::int64_t k = threadIdx.x; d_hidden != nullptr && k < c.shape.dim; k += kThreads)
    audit.d_hidden[to * c.shape.dim + k] = as_float(d_hidden[blockIdx.x * stride + k]);
}

// A thread block for each audited token.
__global__ void __launch_bounds__(kThreads)
    compare_rows(const FarAudit audit, const float* exact, std::int64_t dim) {
  const std::int64_t first = blockIdx.x * dim;
  double error = 0.0;
  double norm = 0.0;
  for (std::int64_t k = threadIdx.x; k < dim; k += kThreads) {
    const double e = exact[first + k];
    const double off = audit.d_hidden[first + k] - e;
    error += off * off;
    norm += e * e;
  }
  const double errors = block_sum(error);
  const double norms = block_sum(norm);
  if (threadIdx.x > 0) return;
  audit.partial[2 * blockIdx.x] = errors;
  audit.partial[2 * blockIdx.x + 1] = norms;
}

__global__ void sum_audit(const ForwardCall exact, const FarAudit audit, FarSums* sums) {
  FarSums s = *sums;
  s.audited = 0;
  s.audit_share = 0.0;
  s.audit_error_squared = s.audit_norm_squared = s.lse_error_squared = s.lse_error_max = 0.0;
  for (std::int64_t i = 0; i < audit.tokens; ++i) {
    if (!has_target(exact, i)) continue;
    ++s.audited;
    s.audit_error_squared += audit.partial[2 * i];
    s.audit_norm_squared += audit.partial[2 * i + 1];
    const double off = fabs(static_cast<double>(audit.lse[i]) - static_cast<double>(exact.lse[i]));
    s.lse_error_squared += off * off;
    s.lse_error_max = off > s.lse_error_max || isnan(off) ? off : s.lse_error_max;
  }
  if (s.audited > 0)
    s.audit_share = static_cast<double>(*audit.valid) / static_cast<double>(s.audited);
  *sums = s;
}

unsigned blocks_of(std::int64_t count, std::int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace

void far_block(const BlockCall& b, const LogitBlock& block, FarBlockFor products) {
  const ForwardCall& c = b.chunk;
  BlockArguments a = arguments(b, block);
  if (products == FarBlockFor::vocab) a.sampled = 1.0f - static_cast<float>(c.far->sample.every);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const dim3 grid(blocks_of(a.tokens, kSide), blocks_of(block.stride, kSide));
  with_narrow_type(c.shape.dtype, [&](auto type) {
    using T = decltype(type);
    transpose_masses<T><<<grid, kThreads, 0, stream>>>(a);
    remove_targets<T>
        <<<blocks_of(a.tokens * c.shape.targets_per_token, kThreads), kThreads, 0, stream>>>(
            c, c.far->order, a);
  });
  require_cuda(cudaGetLastError(), "masses of the far tiles");
}

void far_bounds(const BlockCall& b, const LogitBlock& block, float* bound) {
  const BlockArguments a = arguments(b, block);
  with_narrow_type(b.chunk.shape.dtype, [&](auto type) {
    bound_rows<decltype(type)>
        <<<blocks_of(a.tokens, kWarps), kThreads, 0, static_cast<cudaStream_t>(b.chunk.stream)>>>(
            a, b.chunk.far->radius, b.chunk.far->distance, bound);
  });
  require_cuda(cudaGetLastError(), "bounds of the far field");
}

void clear_targets(const BlockCall& b) {
  const ForwardCall& c = b.chunk;
  const BlockArguments a = arguments(b, b.block);
  with_narrow_type(c.shape.dtype, [&](auto type) {
    zero_targets<decltype(type)>
        <<<blocks_of(a.tokens * c.shape.targets_per_token, kThreads), kThreads, 0,
           static_cast<cudaStream_t>(c.stream)>>>(c, c.far->order, a, b.vocab_begin, b.vocab_count);
  });
  require_cuda(cudaGetLastError(), "targets of the selected tiles");
}

void far_bias(const BlockCall& b, const float* tile_sum, bool add, float* d_bias) {
  const ForwardCall& c = b.chunk;
  const BlockArguments a = arguments(b, b.block);
  with_narrow_type(c.shape.dtype, [&](auto type) {
    sum_bias_vocab<decltype(type)><<<blocks_of(b.vocab_count, kFarGroup), kFarGroup, 0,
                                     static_cast<cudaStream_t>(c.stream)>>>(
        a, c.far->order, b.vocab_begin, c.shape.vocab, b.factor, tile_sum, add, d_bias);
  });
  require_cuda(cudaGetLastError(), "d_bias of the far field");
}

void finish_far(const ForwardCall& c, const GradientOutput& d_hidden, const float* bound,
                float* bound_output, double* partial) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  with_type(d_hidden.dtype, [&](auto type) {
    using T = decltype(type);
    sum_rows<T><<<kParts, kThreads, 0, stream>>>(c, static_cast<const T*>(d_hidden.data),
                                                 d_hidden.stride, bound, bound_output, partial);
  });
  add_sums<<<1, kParts, 0, stream>>>(partial, c.far->sums);
  require_cuda(cudaGetLastError(), "sums of the far field");
}

void order_tokens(const ForwardCall& all, const DeviceOrder& order, const TargetOrder& scratch) {
  if (all.shape.tokens == 0) return;
  const std::int64_t places = position_count(all, order);
  read_keys<<<blocks_of(all.shape.tokens, kThreads), kThreads, 0,
              static_cast<cudaStream_t>(all.stream)>>>(all, order, places, scratch.vocab_ids);
  require_cuda(cudaGetLastError(), "keys of the tokens");
  order_keys(scratch, all.shape.tokens, token_keys(places, all.shape.tokens), all.stream);
}

void order_chunk_tokens(const ForwardCall& c, const DeviceOrder& order,
                        const TargetOrder& scratch) {
  if (c.shape.tokens == 0) return;
  read_chunk_keys<<<blocks_of(c.shape.tokens, kThreads), kThreads, 0,
                    static_cast<cudaStream_t>(c.stream)>>>(c, order, scratch.vocab_ids);
  require_cuda(cudaGetLastError(), "keys of a chunk's tokens");
  order_keys(scratch, c.shape.tokens, chunk_keys(c.shape.tokens), c.stream);
}

void count_audited(const ForwardCall& all, const FarAudit& audit) {
  count_valid<<<1, kThreads, 0, static_cast<cudaStream_t>(all.stream)>>>(all, audit.valid);
  require_cuda(cudaGetLastError(), "tokens to audit");
}

void list_audited(const FarAudit& audit, Stream stream) {
  if (audit.tokens == 0) return;
  spread_rows<<<blocks_of(audit.tokens, kThreads), kThreads, 0,
                static_cast<cudaStream_t>(stream)>>>(audit);
  require_cuda(cudaGetLastError(), "tokens to audit");
}

void keep_audited(const ForwardCall& c, const FarAudit& audit, const GradientOutput& d_hidden) {
  if (c.shape.tokens == 0 || audit.tokens == 0) return;
  with_type(d_hidden.dtype, [&](auto type) {
    using T = decltype(type);
    copy_rows<T><<<static_cast<unsigned>(c.shape.tokens), kThreads, 0,
                   static_cast<cudaStream_t>(c.stream)>>>(
        c, audit, static_cast<const T*>(d_hidden.data), d_hidden.stride);
  });
  require_cuda(cudaGetLastError(), "rows to audit");
}

void compare_audited(const ForwardCall& exact, const FarAudit& audit, const float* d_hidden,
                     FarSums* sums) {
  if (audit.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(exact.stream);
  compare_rows<<<static_cast<unsigned>(audit.tokens), kThreads, 0, stream>>>(audit, d_hidden,
                                                                             exact.shape.dim);
  sum_audit<<<1, 1, 0, stream>>>(exact, audit, sums);
  require_cuda(cudaGetLastError(), "audit");
}

}  // namespace logitless::cuda

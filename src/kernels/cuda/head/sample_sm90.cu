// Samples of tokens from stored logits by the Gumbel-max trick, see device/sample.h.
//
// Random numbers are most of the work. All entries get the first half of their bits, which bound
// their noise. Only where an entry may still win are the other half, two logarithms and the
// division by the temperature computed.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/head/draw_sm90.cuh"
#include "kernels/cuda/head/logit_epilogue.cuh"
#include "kernels/cuda/head/sample_sizes.h"
#include "kernels/device/sample.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEntries = 4;  // of a thread at a time
constexpr int kStride = kThreads * kEntries;

struct DrawArguments {
  const float* logits;  // raw results [tokens, stride]
  std::int64_t stride;
  int vocab;
  float scale, cap;
  const float* bias;
  const float* logit_bias;
  const float* greatest;  // [tokens]: the greatest logit, with logit_bias
  ScoredEntry* best;      // [tokens]
  const std::int64_t* key;
  const void* counter;
  bool int64_counter;
  std::int64_t first_token;
  TokenNumbers temperature, min_p;
  int block_entries;  // entries of a thread block, a multiple of kStride
};

__device__ __forceinline__ float number_of(const TokenNumbers& numbers, std::int64_t token,
                                           float without) {
  return numbers.data == nullptr ? without : numbers.data[numbers.per_token ? token : 0];
}

// A token's sampler.
struct Sampler {
  __device__ __forceinline__ Sampler(const DrawArguments& d, std::int64_t row)
      : greatest(d.greatest[row]) {
    const std::int64_t token = d.first_token + row;
    temperature = number_of(d.temperature, token, 0.0f);
    warm = temperature > 0.0f;
    if (!warm) temperature = 1.0f;
    slope = kLog2EFloat / temperature;
    least = d.min_p.data == nullptr ? -INFINITY : logf(number_of(d.min_p, token, 0.0f));
    if (d.key == nullptr) return;
    std::int64_t counter = token;
    if (d.counter != nullptr) {
      counter = d.int64_counter ? static_cast<const std::int64_t*>(d.counter)[token]
                                : static_cast<const std::int32_t*>(d.counter)[token];
    }
    key = {static_cast<std::uint32_t>(d.key[0] + counter), static_cast<std::uint32_t>(d.key[1])};
  }

  // Returns the entry with its score, or 0 if min_p drops it. `z` is its logit less the greatest.
  __device__ __forceinline__ ScoredEntry scored(float z, std::uint32_t bits,
                                                std::uint32_t vocab_id) const {
    const float s = z / temperature;
    if (s < least) return 0;
    return scored_entry(warm ? s + gumbel_noise(bits, key, vocab_id) : s, vocab_id);
  }

  float greatest, temperature, slope, least;
  bool warm;  // there is noise
  NoiseKey key{};
};

// Four logits as the head's epilogue makes them, less the greatest; -inf past the vocabulary's end.
// Products are rounded before sums, so that equal logits stay equal.
template <bool kGeneral>
__device__ __forceinline__ void read_logits(float (&z)[kEntries], const DrawArguments& d,
                                            const float* row, int first, float factor,
                                            float greatest) {
  const float4 raw = *reinterpret_cast<const float4*>(row + first);
  const float results[kEntries] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int j = 0; j < kEntries; ++j) {
    const int vocab_id = first + j;
    float v = results[j];
    if constexpr (kGeneral) {
      const bool exists = vocab_id < d.vocab;
      if (d.bias != nullptr && exists) v += d.bias[vocab_id];
      v = d.cap > 0.0f ? scaled_and_capped<true>(v, factor, d.cap)
                       : scaled_and_capped<false>(v, factor, d.cap);
      if (d.logit_bias != nullptr && exists) v = __fadd_rn(v, d.logit_bias[vocab_id]);
    } else {
      v *= factor;
    }
    z[j] = vocab_id < d.vocab ? __fsub_rn(v, greatest) : -INFINITY;
  }
}

// Updates the best entry of a token (x) by those of a part of the vocabulary (y). kGeneral: with a
// bias, a softcap or a logit bias.
template <bool kGeneral>
__global__ void __launch_bounds__(kThreads, 6) draw(const DrawArguments d) {
  __shared__ ScoredEntry best;
  const std::int64_t row = blockIdx.x;
  if (threadIdx.x == 0) best = *static_cast<volatile ScoredEntry*>(d.best + row);
  const Sampler sampler(d, row);
  const float factor =
      kGeneral && d.cap > 0.0f ? factor_of<true>(d.scale, d.cap) : factor_of<false>(d.scale, d.cap);
  const float* const logits = d.logits + row * d.stride;
  const int begin = static_cast<int>(blockIdx.y) * d.block_entries;
  const int end = min(begin + d.block_entries, static_cast<int>(d.stride));
  __syncthreads();
  for (int first = begin + static_cast<int>(threadIdx.x) * kEntries; first < end;
       first += kStride) {
    float z[kEntries];
    read_logits<kGeneral>(z, d, logits, first, factor, sampler.greatest);
    std::uint32_t bits[kEntries];
#pragma unroll
    for (int j = 0; j < kEntries; ++j)
      bits[j] = sampler.warm ? random_bits(sampler.key, first + j) : kNoNoise;
    // A greater one since is as good: nothing depends on how many entries are computed.
    const float so_far = score_of(*static_cast<volatile ScoredEntry*>(&best));
    const float above = fmaf(so_far, -kLog2EFloat, kScoreMargin);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (!may_win(bits[j], fmaf(z[j], sampler.slope, above)) || first + j >= d.vocab) continue;
      const ScoredEntry entry = sampler.scored(z[j], bits[j], first + j);
      if (entry > *static_cast<volatile ScoredEntry*>(&best)) atomicMax(&best, entry);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(d.best + row, best);
}

constexpr int kRows = 32;   // tokens of a thread block
constexpr int kParts = 32;  // threads of a token

// greatest[token] = the greatest of its tiles [vocab_tiles][padded_tokens]. best[token] = entry 0,
// with a score below all others.
__global__ void __launch_bounds__(kRows* kParts)
    begin_draw(const float* tiles, int vocab_tiles, std::int64_t padded_tokens, float* greatest,
               ScoredEntry* best) {
  __shared__ float tops[kParts][kRows];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x;
  float top = -INFINITY;
  for (int t = static_cast<int>(threadIdx.y); t < vocab_tiles; t += kParts)
    top = fmaxf(top, tiles[t * padded_tokens + row]);
  tops[threadIdx.y][threadIdx.x] = top;
  __syncthreads();
  if (threadIdx.y > 0) return;
  for (int p = 1; p < kParts; ++p) top = fmaxf(top, tops[p][threadIdx.x]);
  greatest[row] = top;
  best[row] = scored_entry(kLeastNoise, 0);
}

__global__ void write_tokens(const ScoredEntry* best, std::int64_t count, std::int64_t first,
                             bool int64, void* tokens) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= count) return;
  const std::uint32_t vocab_id = vocab_id_of(best[row]);
  if (int64) {
    static_cast<std::int64_t*>(tokens)[first + row] = vocab_id;
  } else {
    static_cast<std::int32_t*>(tokens)[first + row] = static_cast<std::int32_t>(vocab_id);
  }
}

// Draws tokens from stored logits, whose tiles have the greatest ones.
void draw_tokens(const SampleCall& s, const ForwardCall& c, const SampleLayout& layout,
                 const float* tiles, const float* logits) {
  auto* const base = static_cast<std::byte*>(c.workspace);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const std::int64_t tokens = c.shape.tokens, rows = padded_tokens(tokens);
  auto* const greatest = reinterpret_cast<float*>(base + layout.greatest);
  auto* const best = reinterpret_cast<ScoredEntry*>(base + layout.best);
  begin_draw<<<static_cast<unsigned>(ceil_div(tokens, kRows)), dim3(kRows, kParts), 0, stream>>>(
      tiles, static_cast<int>(ceil_div(c.shape.vocab, kTileColumns)), rows, greatest, best);
  require_cuda(cudaGetLastError(), "greatest logits");

  DrawArguments d{};
  d.logits = logits;
  d.stride = padded_vocab(c.shape.vocab);
  d.vocab = static_cast<int>(c.shape.vocab);
  d.scale = c.logit_scale;
  d.cap = c.softcap;
  d.bias = c.bias;
  d.logit_bias = s.logit_bias;
  d.greatest = greatest;
  d.best = best;
  d.key = s.key;
  d.counter = s.counter;
  d.int64_counter = s.int64_counter;
  d.first_token = c.first_token;
  d.temperature = s.temperature;
  d.min_p = s.min_p;
  // About two rounds of thread blocks over all SMs.
  constexpr int kRounds = 16;
  const std::int64_t steps = ceil_div(d.stride, kStride);
  const std::int64_t parts =
      std::clamp<std::int64_t>(ceil_div(kRounds * processor_count(), tokens), 1, steps);
  const std::int64_t steps_of_block = ceil_div(steps, parts);
  d.block_entries = static_cast<int>(steps_of_block) * kStride;
  const dim3 grid(static_cast<unsigned>(tokens),
                  static_cast<unsigned>(ceil_div(steps, steps_of_block)));
  const bool general = c.bias != nullptr || c.softcap != 0.0f || s.logit_bias != nullptr;
  (general ? draw<true> : draw<false>)<<<grid, kThreads, 0, stream>>>(d);
  require_cuda(cudaGetLastError(), "draws of tokens");

  write_tokens<<<static_cast<unsigned>(ceil_div(tokens, kThreads)), kThreads, 0, stream>>>(
      best, tokens, c.first_token, s.int64_tokens, s.tokens);
  require_cuda(cudaGetLastError(), "sampled tokens");
}

}  // namespace

void sample_tokens(const SampleCall& s) {
  if (s.chunk.shape.tokens == 0) return;
  const SampleLayout layout(s.chunk.shape);
  auto* const base = static_cast<std::byte*>(s.chunk.workspace);
  auto* const logits = reinterpret_cast<float*>(base + layout.logits);
  ForwardCall c = s.chunk;
  c.targets = s.tokens;
  c.int64_targets = s.int64_tokens;
  c.bad_target = reinterpret_cast<std::uint64_t*>(base + layout.bad_target);
  const float* const tiles = logits_by_tiles(hopper_tiles(), c, s.logit_bias, logits);
  draw_tokens(s, c, layout, tiles, logits);
  if (c.log_prob == nullptr) return;
  c.block.data = logits;
  forward_by_tiles(stored_tiles(), c);
}

}  // namespace logitless::cuda

// Samples of tokens from stored logits by the Gumbel-max trick, see device/sample.h.
//
// Random numbers are most of the work. All entries that filters keep get the first half of their
// bits, which bound their noise. Only where an entry may still win are the other half, two
// logarithms and the division by the temperature computed.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/head/draw.cuh"
#include "kernels/cuda/head/kept_entries.cuh"
#include "kernels/cuda/head/sample_sizes.h"
#include "kernels/device/sample.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStride = kThreads * kReadEntries;

struct DrawArguments {
  StoredRows rows;
  const float* greatest;  // [tokens]: the greatest logit, with logit_bias
  float* least;           // [tokens]: the least s that top_k and top_p keep; null: all are kept
  ScoredEntry* best;      // [tokens]
  const std::int64_t* key;
  const void* counter;
  bool int64_counter;
  std::int64_t first_token;
  TokenNumbers temperature, top_p, min_p;
  std::int64_t top_k;  // 0: all
  int block_entries;   // entries of a thread block, a multiple of kStride

  bool filters() const { return least != nullptr || min_p.data != nullptr; }
};

__device__ __forceinline__ float number_of(const TokenNumbers& numbers, std::int64_t token,
                                           float without) {
  return numbers.data == nullptr ? without : numbers.data[numbers.per_token ? token : 0];
}

// A token's temperature, 1 for those without noise.
struct Temperature {
  __device__ __forceinline__ Temperature(const DrawArguments& d, std::int64_t token)
      : value(number_of(d.temperature, token, 0.0f)), warm(value > 0.0f) {
    if (!warm) value = 1.0f;
  }
  float value;
  bool warm;  // there is noise
};

// A token's sampler. kFilters: d.filters().
template <bool kFilters>
struct Sampler {
  __device__ __forceinline__ Sampler(const DrawArguments& d, std::int64_t row)
      : greatest(d.greatest[row]) {
    const std::int64_t token = d.first_token + row;
    const Temperature of_token(d, token);
    temperature = of_token.value;
    warm = of_token.warm;
    slope = kLog2EFloat / temperature;
    if constexpr (kFilters) {
      least = d.least == nullptr ? -INFINITY : d.least[row];
      if (d.min_p.data != nullptr) least = fmaxf(least, logf(number_of(d.min_p, token, 0.0f)));
      // The product's rounding, and that of s, are less than these.
      const float bound = least * temperature;
      least_z = bound - (fabsf(bound) * 0x1p-20f + 0x1p-126f);
    }
    if (d.key == nullptr) return;
    std::int64_t counter = token;
    if (d.counter != nullptr) {
      counter = d.int64_counter ? static_cast<const std::int64_t*>(d.counter)[token]
                                : static_cast<const std::int32_t*>(d.counter)[token];
    }
    key = {static_cast<std::uint32_t>(d.key[0] + counter), static_cast<std::uint32_t>(d.key[1])};
  }

  // Returns the entry with its score, or 0 if a filter drops it. `z` is its logit less the
  // greatest.
  __device__ __forceinline__ ScoredEntry scored(float z, std::uint32_t bits,
                                                std::uint32_t vocab_id) const {
    const float s = z / temperature;
    if (kFilters && s < least) return 0;
    return scored_entry(warm ? s + gumbel_noise(bits, key, vocab_id) : s, vocab_id);
  }

  float greatest, temperature, slope;
  float least = -INFINITY;    // least s that is kept
  float least_z = -INFINITY;  // a bound: no entry with less z is kept
  bool warm;                  // there is noise
  NoiseKey key{};
};

// Updates the best entry of a token (x) by those of a part of the vocabulary (y). kGeneral:
// d.rows.general(). With filters most entries are dropped before their random numbers are drawn.
template <bool kGeneral, bool kFilters>
__global__ void __launch_bounds__(kThreads, 6) draw(const DrawArguments d) {
  __shared__ ScoredEntry best;
  const std::int64_t row = blockIdx.x;
  if (threadIdx.x == 0) best = *static_cast<volatile ScoredEntry*>(d.best + row);
  const Sampler<kFilters> sampler(d, row);
  const LogitReader<kGeneral> reader(d.rows, row);
  const int begin = static_cast<int>(blockIdx.y) * d.block_entries;
  const int end = min(begin + d.block_entries, static_cast<int>(d.rows.stride));
  __syncthreads();
  for (int first = begin + static_cast<int>(threadIdx.x) * kReadEntries; first < end;
       first += kStride) {
    if constexpr (kFilters) {  // a warp's entries are of one tile
      const float top = d.rows.tile_top(row, first / kTileColumns);
      if (__fsub_rn(top, sampler.greatest) < sampler.least_z) continue;
    }
    float z[kReadEntries];
    reader.read(z, d.rows, first);
    std::uint32_t bits[kReadEntries];
#pragma unroll
    for (int j = 0; j < kReadEntries; ++j) {
      z[j] = __fsub_rn(z[j], sampler.greatest);
      bits[j] = kNoNoise;
      if (sampler.warm && !(kFilters && z[j] < sampler.least_z))
        bits[j] = random_bits(sampler.key, first + j);
    }
    // A greater one since is as good: nothing depends on how many entries are computed.
    const float so_far = score_of(*static_cast<volatile ScoredEntry*>(&best));
    const float above = fmaf(so_far, -kLog2EFloat, kScoreMargin);
#pragma unroll
    for (int j = 0; j < kReadEntries; ++j) {
      if (!may_win(bits[j], fmaf(z[j], sampler.slope, above)) || first + j >= d.rows.vocab)
        continue;
      if (kFilters && z[j] < sampler.least_z) continue;
      const ScoredEntry entry = sampler.scored(z[j], bits[j], first + j);
      if (entry > *static_cast<volatile ScoredEntry*>(&best)) atomicMax(&best, entry);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(d.best + row, best);
}

// d.least[token] = the least s of the entries that top_k and top_p keep, -INFINITY for all. A
// thread block for each token.
template <bool kGeneral>
__global__ void __launch_bounds__(kSelectThreads, 2) find_least(const DrawArguments d) {
  __shared__ Selection m;
  const std::int64_t row = blockIdx.x, token = d.first_token + row;
  const float greatest = d.greatest[row], temperature = Temperature(d, token).value;
  const float top_p = number_of(d.top_p, token, 1.0f);
  const Span span = span_of(d.rows, row, m);
  RowEntries<kGeneral> entries{d.rows, row};
  if (d.top_k > 0) entries.least = least_of_best<kGeneral>(d.rows, row, span, d.top_k, m);
  if (top_p < 1.0f) {
    const ProbabilityWeights weights(greatest, temperature, d.rows.vocab, top_p);
    const bool few = d.top_k > 0 && d.top_k <= kMostListed;
    const LinearBins bins = few ? LinearBins{} : bins_of(span, weights.range());
    entries.least = m.select(entries, weights, bins);
  }
  if (threadIdx.x > 0) return;
  d.least[row] =
      entries.least == 0 ? -INFINITY : __fsub_rn(score_of(entries.least), greatest) / temperature;
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
                 const StoredRows& stored) {
  auto* const base = static_cast<std::byte*>(c.workspace);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const std::int64_t tokens = c.shape.tokens, rows = padded_tokens(tokens);
  auto* const greatest = reinterpret_cast<float*>(base + layout.greatest);
  auto* const best = reinterpret_cast<ScoredEntry*>(base + layout.best);
  begin_draw<<<static_cast<unsigned>(ceil_div(tokens, kRows)), dim3(kRows, kParts), 0, stream>>>(
      stored.tile_tops, stored.vocab_tiles, rows, greatest, best);
  require_cuda(cudaGetLastError(), "greatest logits");

  DrawArguments d{};
  d.rows = stored;
  d.greatest = greatest;
  d.best = best;
  d.key = s.key;
  d.counter = s.counter;
  d.int64_counter = s.int64_counter;
  d.first_token = c.first_token;
  d.temperature = s.temperature;
  d.top_p = s.top_p;
  d.min_p = s.min_p;
  d.top_k = s.top_k;
  const bool general = stored.general();
  if (s.top_k > 0 || s.top_p.data != nullptr) {
    d.least = reinterpret_cast<float*>(base + layout.least);
    (general ? find_least<true>
             : find_least<false>)<<<static_cast<unsigned>(tokens), kSelectThreads, 0, stream>>>(d);
    require_cuda(cudaGetLastError(), "entries that filters keep");
  }
  // About two rounds of thread blocks over all SMs.
  constexpr int kRounds = 16;
  const std::int64_t steps = ceil_div(stored.stride, kStride);
  const std::int64_t parts =
      std::clamp<std::int64_t>(ceil_div(kRounds * processor_count(), tokens), 1, steps);
  const std::int64_t steps_of_block = ceil_div(steps, parts);
  d.block_entries = static_cast<int>(steps_of_block) * kStride;
  const dim3 grid(static_cast<unsigned>(tokens),
                  static_cast<unsigned>(ceil_div(steps, steps_of_block)));
  const auto draw_of = [&](auto plain, auto filtering) {
    (d.filters() ? filtering : plain)<<<grid, kThreads, 0, stream>>>(d);
  };
  general ? draw_of(draw<true, false>, draw<true, true>)
          : draw_of(draw<false, false>, draw<false, true>);
  require_cuda(cudaGetLastError(), "draws of tokens");

  write_tokens<<<static_cast<unsigned>(ceil_div(tokens, kThreads)), kThreads, 0, stream>>>(
      best, tokens, c.first_token, s.int64_tokens, s.tokens);
  require_cuda(cudaGetLastError(), "sampled tokens");
}

}  // namespace

void sample_tokens(const SampleCall& s) {
  if (s.chunk.shape.tokens == 0) return;
  const SampleLayout layout(*s.kernel, s.chunk.shape);
  auto* const base = static_cast<std::byte*>(s.chunk.workspace);
  auto* const logits = reinterpret_cast<float*>(base + layout.logits);
  ForwardCall c = s.chunk;
  c.targets = s.tokens;
  c.int64_targets = s.int64_tokens;
  c.bad_target = reinterpret_cast<std::uint64_t*>(base + layout.bad_target);
  auto* const tops = reinterpret_cast<float*>(base + layout.tile_tops);
  s.kernel->stored->store(c, s.logit_bias, logits, tops);
  draw_tokens(s, c, layout, stored_rows(c, tops, logits, s.logit_bias));
  if (c.log_prob == nullptr) return;
  c.block.data = logits;
  s.kernel->stored->forward(c);
}

}  // namespace logitless::cuda
